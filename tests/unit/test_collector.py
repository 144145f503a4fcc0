"""When Python's garbage collector runs."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

from tiny_files import save

LIFE = """
import gc, sys
from swiftopt.core import collector
class Told:
    def __del__(self):
        print("walked")
imported = Told()
imported.itself = imported
collector.start()
print(gc.isenabled(), gc.get_threshold()[0])
from swiftopt.models.loading import load
runtime = load(sys.argv[1], device="cpu", speed="eager")
print(gc.isenabled(), gc.get_threshold() == collector.DEFAULT_THRESHOLDS, gc.get_freeze_count() > 100_000)
del imported
gc.collect()
circle = Told()
circle.itself = circle
del circle
print("collected", gc.collect() > 0)
own = Told()
sys.modules["kept"] = own.itself = own
del own, Told
"""


def test_a_program_collects_seldom_until_its_model_is_there_and_not_at_its_end(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LIFE, save(tmp_path / "tiny")], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["True 500000", "True True True", "walked", "collected True"], done.stderr


def test_a_library_leaves_the_times_that_its_user_set(tmp_path: Path) -> None:
    from swiftopt.models.loading import load

    usual = gc.get_threshold()
    try:
        gc.set_threshold(1234)
        load(str(save(tmp_path / "tiny")), device="cpu", speed="eager")
        assert gc.get_threshold()[0] == 1234
    finally:
        gc.set_threshold(*usual)
