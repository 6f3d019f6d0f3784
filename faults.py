"""What a run does about faults, beside the engines' own supervision (engine.py).

    Recorder    the flight recorder: events.jsonl, a line for whatever happens beside training itself
"""

import json
import os
import time


class Recorder:
    """Appends to events.jsonl of the run directory; every rank writes its own lines.

    A line: {"time": unix seconds, "rank", "attempt": of the job, by torchrun, "event", and what belongs to the event}.
    """

    def __init__(self, run_dir: str, rank: int):
        self.path = os.path.join(run_dir, "events.jsonl")
        self.rank = rank
        self.attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))

    def __call__(self, event: str, **facts) -> None:
        line = {"time": round(time.time(), 3), "rank": self.rank, "attempt": self.attempt, "event": event, **facts}
        with open(self.path, "a") as f:  # one write in append mode: lines of several processes do not mix
            f.write(json.dumps(line) + "\n")
