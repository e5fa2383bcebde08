"""One of several processes of `run_together`: the runs in a file, one after the other."""

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

from piston import presets
from piston.training.loop import train_loop


def main() -> None:
    results = []
    for job in json.loads(Path(sys.argv[1]).read_text()):
        os.environ["MASTER_PORT"] = str(job["port"])
        try:
            config = presets.train_config_from_json(job["config"], "job")
            results.append({"checkpoint": str(train_loop(config))})
        except (ValueError, RuntimeError) as error:
            results.append({"error": str(error)})
            if dist.is_initialized():
                dist.destroy_process_group()
    sys.stdout.write(json.dumps(results))


if __name__ == "__main__":
    main()
