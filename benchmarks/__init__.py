"""What ckptguard costs, against the naive way and the peers in one run. Start each from the root of the checkout:
``python -m benchmarks.bench_scan``. The tests run each once in a tiny form (``tests/test_benchmarks.py``)."""

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(place) for place in (_ROOT / "tests", _ROOT / "daemon") if str(place) not in sys.path]
