"""Background: work of a manager's that runs beside training, on a thread of its own.

[Note: Planning beside training] Making a plan takes up to a second, so no hook does it. A hook
starts a job, and the hooks of a later forward take what it has found; none of them waits. A job
refers to data alone: records, steps, rates. It takes no lock of an engine's, touches no ledger and
warns nobody, which is for whoever takes what it found.

There is a thread only while there are jobs, one at a time and in their order. It is not a daemon:
an interpreter that exits waits for the job that is running, and jobs that wait for other processes
look whether they should (`Job.wanted`). After a fork the child has no such thread; it starts the
job anew.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class Job:
    """One piece of work, as its thread knows it: nothing of who asked for it.

    Args:
        work: is called on the thread with this job, and returns what it has found.
        owner: whoever wants it.
    """

    def __init__(self, work: Callable[[Job], Any], owner: Background) -> None:
        self._work = work
        self._owner = weakref.ref(owner)
        self._thread: threading.Thread | None = None
        self._found: Any = None
        self._error: BaseException | None = None
        self.done = False
        self.given_up = False
        #: The forward with which what was found takes effect; None: the next one.
        self.at: int | None = None
        #: The forward that must not begin before this is done; None: there is none.
        self.before: int | None = None

    @property
    def wanted(self) -> bool:
        """Whether somebody will take what it finds. False where the interpreter exits."""
        alive = self._owner() is not None and threading.main_thread().is_alive()
        return alive and not self.given_up

    def start(self) -> None:
        """Start a thread for it, unless it is done or has one in this process."""
        if self.done or (self._thread is not None and self._thread.is_alive()):
            return
        self._thread = threading.Thread(target=self.run, name="memswap planning", daemon=False)
        try:
            self._thread.start()
        except (
            RuntimeError
        ):  # there is none to be had, or none any more: a later forward asks again
            self._thread = None

    def run(self) -> None:
        """Do the work here and now."""
        try:
            self._found = self._work(self)
        except BaseException as error:  # for who takes what was found
            self._error = error
        self.done = True

    def wait(self) -> None:
        """Block until it is done, or until what is given up has ended."""
        if not self.given_up:
            self.start()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()
        elif not self.done and not self.given_up:
            self.run()  # there is no thread

    def result(self) -> Any:
        """What was found; raises what the work raised. Once."""
        found, error = self._found, self._error
        self._found = self._error = None
        if error is not None:
            raise error
        return found


class Background:
    """The jobs of one manager. Its engine's lock serialises the calls, `Job.wait` excepted."""

    def __init__(self) -> None:
        #: With what is to be done with the result, and whom it is for. The first job runs.
        self._jobs: deque[tuple[Job, Callable[[Any], None], object]] = deque()

    @property
    def current(self) -> Job | None:
        """The job that runs, or whose result has not been taken."""
        return self._jobs[0][0] if self._jobs else None

    def works_for(self, whom: object) -> bool:
        """Whether there is a job of somebody's."""
        return any(one is whom for _, _, one in self._jobs)

    def submit(self, work: Callable[[Job], Any], then: Callable[[Any], None], whom: object) -> None:
        """Have work done once what was submitted before is done.

        Args:
            work: refers to data, and to nothing that holds this object.
            then: is called with the result by `collect`.
            whom: it is for.
        """
        self._jobs.append((Job(work, self), then, whom))
        if len(self._jobs) == 1:
            self._jobs[0][0].start()

    def collect(self, forward: int = 0) -> None:
        """Take what was found by now; of ranks that plan together, what takes effect by now.

        Args:
            forward: of these, the number of the one that begins.

        Raises:
            Exception: what a job raised.
        """
        while self._jobs:
            job, then, _ = self._jobs[0]
            job.start()
            if job.before is not None and job.before <= forward:
                job.wait()
            if not job.done or (job.at is not None and job.at > forward):
                return
            self._jobs.popleft()
            if self._jobs:
                self._jobs[0][0].start()
            then(job.result())

    def give_up(self) -> list[Job]:
        """Nobody wants what is under way any more. Returns it, to be waited for without locks."""
        given_up = [job for job, _, _ in self._jobs]
        for job in given_up:
            job.given_up = True
        self._jobs.clear()
        return given_up[:1]
