"""Recording datasets on a robot's computer, without PyTorch: NumPy and the extra `record` suffice.

    from piston.data.record import Recorder

`recorder` takes frames one by one, `declare` checks them, `encoding` makes videos of them,
`columns` and `labels` make tables of the rest, and `writer` stores whole episodes.
"""

from piston.data.record.declare import FrameError
from piston.data.record.encoding import VideoEncoding
from piston.data.record.labels import Question
from piston.data.record.recorder import Recorder

__all__ = ["FrameError", "Question", "Recorder", "VideoEncoding"]
