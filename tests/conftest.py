import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.pool import stop_all


def pytest_sessionfinish(session, exitstatus):
    stop_all()
