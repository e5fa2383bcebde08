"""Make the pictures of docs/why-it-fails.md: sections of the pages that `piston inspect` writes.

    python docs/why_it_fails.py runs/demo     # a run of `piston demo`; needs chromium

The faulty policies are those of tests/inspection, trained here.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageChops

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))

from tests.inspection import tiny  # noqa: E402
from tests.inspection.test_faults import drive, swap_red_and_blue  # noqa: E402

from piston.inference.loading import load_policy  # noqa: E402
from piston.inference.recording import RecordingPolicy  # noqa: E402
from piston.inspection import Frames, Plan, compute  # noqa: E402
from piston.report.document import page_text  # noqa: E402
from piston.report.inspection import sections  # noqa: E402

# Pixels of the window, of what is left out of it above and below, and where a picture ends.
WIDTH, TITLE, FOOTER, LONGEST = 900, 130, 50, 1260


def main(demo: Path, work: Path) -> None:
    data, checkpoint = demo / "data", next((demo / "checkpoints").glob("*/*/[0-9]*"))
    policy = load_policy(checkpoint)
    found = compute(policy, Frames.open(policy, data), plan=Plan(frames=4))
    save(work, "why-good", sections(found), "Conclusions", "What each input changes")
    save(work, "why-looks", sections(found), "Where it looks")
    data = tiny.record(work / "shuffled", "sentences shuffled")
    policy = load_policy(tiny.train(data, work / "shuffled-run"))
    found = compute(policy, Frames.open(policy, data), plan=Plan(frames=24))
    save(work, "why-sentence", sections(found), "Conclusions", "What each input changes")
    data = tiny.record(work / "good")
    policy = load_policy(tiny.train(data, work / "good-run"))
    recording = RecordingPolicy(policy, work / "live", tiny.FPS)
    drive(lambda seen: recording.infer_batch([seen])[0], swap_red_and_blue)
    recording.close()
    live = Frames.open(policy, work / "live", needs_cameras=False)
    found = compute(policy, Frames.open(policy, data), live=live)
    save(work, "why-live", sections(found), "Conclusions", "Training against live")


def save(work: Path, name: str, found: dict, *titles: str) -> None:
    """Photograph some sections, without the page's title and footer."""
    page, picture = work / f"{name}.html", work / f"{name}.png"
    shown = {title: found[title] for title in titles if title in found}
    page.write_text(page_text("Why it does that", "", [], shown), "utf-8")
    window = [f"--screenshot={picture}", f"--window-size={WIDTH},2400", "--hide-scrollbars"]
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", *window, page.as_uri()]
    subprocess.run(command, check=True, capture_output=True)
    image = Image.open(picture).convert("RGB")
    empty = Image.new("RGB", image.size, image.getpixel((0, image.height - 1)))
    _, _, _, bottom = ImageChops.difference(image, empty).getbbox() or (0, 0, 0, 1)
    image = image.crop((0, TITLE, image.width, min(bottom - FOOTER, LONGEST)))
    image.save(DOCS / f"{name}.webp", quality=70, method=6)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(sys.argv[1]), Path(folder))
