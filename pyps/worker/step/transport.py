"""Carries out a worker's steps (pyps.step.machine): serially, or with transfers in the background.

    main thread, d = 2   compute k          compute k + 1         compute k + 2
    transfers            push k - 1, pull   push k, pull          push k + 1, pull

The period of a pipeline of depth d is the longest of compute, of what the link's busier direction takes, and
of 1 / (d - 1) of a transfer. Over a link several transfers travel at once; a store on this machine does one
after the other. Each brings the claim and the staging buffer of a step to come, so the main thread never
waits for the store while it has some.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from pyps.errors import Ended, Fenced, InputError, InvalidArgument
from pyps.formats.records import Span
from pyps.native.transfer import ArrivalCallback, Ask, Transferred, TransferRequest, seconds_of
from pyps.native.values import Claim, Encoding, Flat, PushRequest, PushResult
from pyps.solver.online.mode import ModeBalancer, TimedStep
from pyps.step import events
from pyps.step.machine import StepMachine, StepRules
from pyps.store.codec import as_codec, fed_back
from pyps.store.staging import StagingBuffer
from pyps.store.store import Store
from pyps.worker.background import CLOSE_SECONDS, BackgroundThread
from pyps.worker.device.binding import Binding
from pyps.worker.step.client import Land, Landed, StoreClient
from pyps.worker.step.onward import Onward
from pyps.worker.step.step import Step

StepCallback = Callable[[Step, Transferred], None]
Merge = Callable[[Callable[[], int]], int]
BACK_BUFFERS = 2


class Way:
    """How the transfers of a worker are made; one is taken after the other, in the order of the sends. Here
    each is made when it is taken.
    """

    def __init__(self, client: StoreClient, binding: Binding) -> None:
        self._client, self._binding = client, binding
        self._sent: TransferRequest[PushRequest] | None = None

    def send(self, request: TransferRequest[PushRequest]) -> None:
        """Begin a transfer."""
        self._sent = request

    @property
    def ready(self) -> int:
        """Transfers that have ended and were not taken."""
        return 0

    def take(self) -> Landed:
        """The oldest transfer, when it has ended. Raises what it raised."""
        assert self._sent is not None
        request, self._sent = self._sent, None
        return self._binding.land(self._client.begin_transfer(request))

    def load(self) -> bool:
        """Put the newest parameters that came back where the binding takes them from; False, and nothing is
        done, if they came with a transfer that was not taken.
        """
        return True

    def close(self, timeout: float) -> None:
        """Leave the store after any transfer under way. Raises TimedOut. Idempotent."""
        self._client.store.close()


class Overlapped(Way):
    """Transfers are made in the background, by a thread that sends and one that receives.

    timeout: seconds that a transfer may take.
    """

    def __init__(self, client: StoreClient, binding: Binding, timeout: float) -> None:
        super().__init__(client, binding)
        self._timeout = timeout
        # One receives what is pulled while the other has the newest parameters.
        self._back_buffers = [binding.vector() for _ in range(BACK_BUFFERS)]
        self._newest = 0
        self._ended = self._taken = 0  # transfers
        self._arrived = self._loaded = 0  # the transfers that brought the newest parameters, and those loaded
        self._lock = threading.Lock()
        name = f"pyps-transfer-{client.store.rank}"
        self._sender: BackgroundThread[None] = BackgroundThread(f"{name}-out")
        self._receiver: BackgroundThread[Landed] = BackgroundThread(name)

    def send(self, request: TransferRequest[PushRequest]) -> None:
        self._sender.submit(partial(self._post, request))
        while self._sender.results_ready > 1:
            self._sender.take(0.0)

    @property
    def ready(self) -> int:
        return self._receiver.results_ready

    def take(self) -> Landed:
        landed = self._receiver.take(self._timeout)
        self._taken += 1
        return landed

    def load(self) -> bool:
        with self._lock:
            if self._arrived > self._taken:
                return False
            if self._binding.swaps and self._arrived == self._loaded:
                return True
            newest, self._loaded = self._newest, self._arrived
            self._back_buffers[newest] = self._binding.take(self._back_buffers[newest])
            return True

    def close(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        self._sender.close(partial(self._receiver.end, self._client.store.close), timeout)
        self._receiver.join(max(0.0, deadline - time.monotonic()))

    def _post(self, request: TransferRequest[PushRequest]) -> None:
        """In the sending thread: send, or hand over what is sent when its turn comes."""
        try:
            finish = self._client.begin_transfer(request)
        except BaseException as error:
            finish = partial(_fail, error)
        self._receiver.submit(partial(self._finish, finish))

    def _finish(self, finish: Land) -> Landed:
        """In the receiving thread: what came back of a transfer."""
        other = 1 - self._newest
        vector = self._back_buffers[other]
        self._ended += 1
        landed = self._binding.land(finish, vector)
        if landed[0].version is not None:
            with self._lock:
                self._newest, self._arrived = other, self._ended
        return landed


class _Untaken(Exception):
    """Newer parameters have come: their transfer is to be taken first, as they have its gradient."""


class Transport:
    """A worker's steps. All methods belong to the main thread.

    report: receives each step that was sent, once its outcome is known. encoding: of pushes, at first. modes:
    changes codecs and depth as the link and the device do; None: they stay. merge: brings parameters into the
    model in the middle of a step, by the call that it gets, with the local steps taken so far; None: no local
    steps. own: moves the parameters along its gradients under way; None: they stay as they came. timeout:
    seconds that a transfer of a pipeline may take. A fenced worker rejoins by itself; what it had claimed is
    dropped.
    """

    def __init__(
        self,
        client: StoreClient,
        binding: Binding,
        report: StepCallback,
        rules: StepRules,
        *,
        timeout: float,
        encoding: Encoding,
        modes: ModeBalancer | None = None,
        merge: Merge | None = None,
        own: Onward | None = None,
    ) -> None:
        self.encoding = encoding  # of the next push
        self._modes = modes
        self._client, self._binding, self._report = client, binding, report
        self._merge = merge or (lambda bring: bring())
        self._own = own
        self._machine = StepMachine(rules)
        self._way = Way(client, binding) if rules.depth == 1 else Overlapped(client, binding, timeout)
        self._sent: deque[Step] = deque()
        self._sending: tuple[Step, PushRequest] | None = None
        self._claims: deque[tuple[Claim, StagingBuffer]] = deque()  # of the next steps
        self._computing: tuple[Claim, StagingBuffer] | None = None  # of the step under way
        self._failure: BaseException | None = None  # nothing can follow a transfer that failed
        self._waits: list[Span] = []  # since the last step began
        self._ready = 0.0  # when the next step's claim was there
        self._merges: list[Span] = []  # in the middle of the step under way
        self._landed: tuple[Step, Transferred] | None = None  # what has come back and is not reported
        self._back: tuple[Step, Transferred] | None = None  # what came back last
        self._taking = False
        self._may_claim = False

    @property
    def depth(self) -> int:
        """Steps under way at once."""
        return self._machine.rules.depth

    @property
    def idle(self) -> bool:
        """Return whether no transfer is under way."""
        return self._way.ready >= len(self._sent)

    def begin(self) -> Step | None:
        """The next step, its parameters in the model; None when the run's samples are used up."""
        self._ready = 0.0
        if self.depth > 1 and self._computing is not None:  # of a step that was given up
            self._claims.appendleft(self._computing)
            self._computing = None
        action = self._drive(events.Wanted())
        if isinstance(action, events.End):
            return None
        assert isinstance(action, events.Compute)
        self._may_claim = action.may_claim
        claim, staging = self._computing = self._claims.popleft()
        self._ready = self._ready or time.monotonic()
        self._binding.attach_grads(staging)
        if self._own is not None:
            self._own.go_on(self._binding.flat)
            self._binding.pulled()
        self._binding.refresh()
        spans, self._waits = self._waits, []
        return Step(claim, staging, action.version, [*spans, ("pull", self._ready, time.monotonic())])

    def claim_ahead(self) -> None:
        """Claim the samples of the next step now, if the policy lets it: they are loaded meanwhile."""
        if self._may_claim:
            with suppress(Fenced):  # the push will say so
                self._client.claim_ahead(1)

    def go_on(self, step: Step, following: int) -> events.Control:
        """Between two micro-batches of a step, the next with `following` samples: Continue, Finish or
        Abort. Newer parameters may have come into the model.
        """
        event = events.Partial(step.done - step.micro, step.done, step.done + step.left, following)
        action = self._drive(event)
        if isinstance(action, events.Continue) and self._machine.rules.local:
            step.version = action.version  # else the oldest that its gradient is computed on
        step.spans, self._merges = step.spans + self._merges, []
        return action

    def send(self, step: Step, request: PushRequest) -> PushResult | None:
        """Push a step's gradient; the result of the step that has arrived, None if that was not applied. In a
        pipeline the gradient travels while the next steps are computed.
        """
        if self.depth > 1:  # the claim was made long before the compute began, and the model goes on
            request = replace(request, compute_seconds=time.monotonic() - step.created)
            self._computing = None
        self._sending, self._back = (step, request), None
        action = self._drive(events.Computed())
        assert isinstance(action, events.Return)
        if action.dropped:
            self._report(step, Transferred(rejected=True, fenced=True))
        if self._back is None:
            return None
        back, done = self._back
        return done.result if back.finite else None

    def refresh(self) -> int:
        """Pull one single version into the model, after any transfer under way; the version. Raises what a
        transfer raised, TimedOut if one takes too long.
        """
        self._drive(events.Flush())
        try:
            _, version = self._client.store.pull(self._binding.flat, strict=True)
        except Fenced:
            self._drive(events.WasFenced())
            _, version = self._client.store.pull(self._binding.flat, strict=True)
        self._binding.pulled()
        self._loaded()
        self._binding.refresh()
        self._drive(events.Refreshed(version))
        return version

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Leave the store after any transfer under way, and report what came of all of them. Raises TimedOut,
        and once what a transfer, or the report of it, raised. Idempotent.
        """
        self._way.close(timeout)
        first: BaseException | None = None
        while self._sent and self._failure is None and self.depth > 1:
            try:
                self._take()
            except BaseException as error:
                self._failure = error  # nothing can follow it
                first = first or error
            try:
                self._tell()
            except BaseException as error:
                first = first or error
        if first is not None:
            raise first

    # The machine's actions.

    def _drive(self, event: events.Event) -> events.Control:
        """Carry out what follows from an event, until it is the trainer's turn."""
        if self._failure is not None:
            raise self._failure
        action = self._machine.receive(event)
        while not isinstance(action, events.Control):
            try:
                event = self._do(action)
            except Fenced as error:
                if isinstance(action, events.Rejoin):  # found dead: its place is gone
                    self._machine.receive(events.Interrupted())
                    raise error
                event = events.WasFenced()
            except Ended:
                event = events.RanOut()
            except BaseException as error:
                if self._taking and self.depth > 1:
                    self._failure = error
                self._machine.receive(events.Interrupted(transfer=self._taking))
                self._taking = False
                raise
            action = self._machine.receive(event)
            try:
                self._tell()
            except BaseException:
                if not isinstance(action, events.Control):
                    self._machine.receive(events.Interrupted())
                raise
        return action

    def _tell(self) -> None:
        """Report what has come back."""
        if self._landed is not None:
            landed, self._landed = self._landed, None
            self._report(*landed)

    def _do(self, action: events.Action) -> events.Event:
        match action:
            case events.ClaimNext():
                return self._claim(action.ahead)
            case events.Pull():
                return events.Pulled(self._merging(self._pull) if action.merges else self._pull())
            case events.Check():
                return events.Advised(self._client.store.should_continue(action.done, action.following))
            case events.Send():
                return self._send(action.ask)
            case events.Take():
                return self._take() if action.waits or self._way.ready else events.Pending()
            case events.Load():
                try:
                    self._merging(self._load) if action.merges else self._load()
                except _Untaken:
                    return self._take()
                if self.depth > 1 and not action.merges:
                    self._binding.refresh()
                return events.Loaded()
            case events.Rejoin():
                self._claims.clear()
                self._computing = None
                self._client.rejoin()
                return events.Rejoined()
        raise AssertionError(action)

    def _claim(self, ahead: int) -> events.Event:
        began = time.monotonic()
        claims = [self._client.claim(), *self._client.claim_ahead(ahead)]
        if self.depth == 1 and self._computing is not None:  # of a step that was given up
            with suppress(InvalidArgument):  # the store has it
                self._client.store.unstage(self._computing[1])
        self._claims.extend([(claim, self._client.store.stage()) for claim in claims])
        self._ready = time.monotonic()
        self._waits.append(("wait", began, self._ready))
        return events.Claimed(len(claims), claims[0].version)

    def _send(self, ask: Ask) -> events.Event:
        assert self._sending is not None
        (step, request), self._sending = self._sending, None
        step.mode = self._modes.mode if self._modes is not None else None
        self._sent.append(step)
        if self._own is not None:
            self._own.sent(request, step.staging.flat)
        self._way.send(TransferRequest(request, self._client.pull_codec, ask))
        return events.Sent()

    def _take(self) -> events.Event:
        began, waits = time.monotonic(), self.depth > 1 and not self._way.ready
        step = self._sent.popleft()
        if self._own is not None:
            self._own.arrived()
        self._taking = True
        done, staging = self._way.take()
        self._taking = False
        if self.depth == 1:
            self._computing = None
        if waits:
            self._waits.append(("wait", began, time.monotonic()))
        self._binding.commit_residual(done.result is not None and step.finite)
        self._landed = step, done
        if done.fenced:
            return events.Arrived(fenced=True)
        self._back = step, done
        self._claims.extend(zip(done.claims, staging, strict=True))
        waited = done.result.wait_seconds if done.result is not None else 0.0
        there, back = seconds_of(done.spans, "push"), seconds_of(done.spans, "pull")
        computed = step.compute_seconds
        if step.mode is not None and step.finite and not done.skipped:  # else no gradient travelled
            ended = max(end for _, _, end in done.spans)
            self._follow(TimedStep(step.mode, computed, there, waited, back, ended))
        return events.Arrived(done.version, len(done.claims), False, waited, there + back, computed)

    def _follow(self, one: TimedStep) -> None:
        """A transfer has ended: the mode of the next ones may change."""
        assert self._modes is not None
        if (change := self._modes.hear(one)) is not None:
            self.encoding = fed_back(as_codec(change.after.push))
            self._client.pull_codec = as_codec(change.after.pull)
            self._machine.set_depth(change.after.depth)

    def _merging(self, bring: Callable[[], int]) -> int:
        """Bring parameters into the model in the middle of a step; their version."""

        def parameters() -> int:
            version = bring()
            self._binding.refresh_parameters()
            return version

        began = time.monotonic()
        version = self._merge(parameters)
        self._merges.append(("pull", began, time.monotonic()))
        return version

    def _pull(self) -> int:
        version = self._client.pull(self._binding.flat)
        self._binding.pulled()
        self._loaded()
        return version

    def _load(self) -> int:
        if not self._way.load():
            raise _Untaken
        self._loaded()
        return 0

    def _loaded(self) -> None:
        if self._own is not None:
            self._own.loaded()


def check_depth(depth: int, store: Store) -> None:
    """Raise InputError for more steps under way than the store has staging buffers for."""
    if depth > store.layout.staging_buffers:
        found = f"{depth}, in a store made for at most {store.layout.staging_buffers}"
        raise InputError("pipeline", "depth", found, "one depth for all ranks, or rank 0's the greatest")


def extra_buffers(depth: int) -> int:
    """How many more vectors of parameters a pipelined worker holds than a serial one, which has one staging
    buffer.
    """
    return depth - 1 + BACK_BUFFERS if depth > 1 else 0


def _fail(error: BaseException, out: Flat, arrived: ArrivalCallback | None) -> Landed:
    raise error
