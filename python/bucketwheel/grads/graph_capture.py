"""Graph capture: sync windows that are part of a CUDA graph.

[Note: captured windows] A window that begins while the current stream is captured ends in the same capture. It enqueues what
any window does; the graph has it, with the addresses, and nothing of it runs before a replay. So:

- Nothing that a captured window reads is from outside: no gradient, no pending factor, no event. Replays come behind
  whatever their stream holds, and an eager window is joined to the stream that has closed it.
- A bucket has the place that it has in eager windows: the optimizer keeps the lease of all places until `close`, so that
  nobody else gets the bytes between two replays. Graphs that write the same parameters never run at once, so they share the
  places. Within a capture bytes go on from bucket to bucket behind the event of their last reader. What finds no place has
  memory of the optimizer's own, for each capture anew, that stays until the optimizer's end (`Places::enter_side`,
  csrc/window/places.h).
- The host learns nothing of replays. What it knows of the shards is what it was at the end of the capture, which is what
  each replay leaves. Factors and sums are the device's once there has been a capture: what the host does to gradients
  between windows goes there as it is done, and nothing that was computed outside of a capture is taken for its own.
- A capture that ends, or fails, with the window open, or with gradients that `no_sync` has kept, leaves gradients that
  will never come. Every call says so, in the next capture too, until `zero_grad` forgets them.
"""

from __future__ import annotations

from bucketwheel.errors import CaptureError
from bucketwheel.native import core


class Captures:
    """Which gradients of an optimizer are captured in a CUDA graph. ``is_capturable``: whether any may be.

    A capture is known by a number that no other has; 0 is none.
    """

    def __init__(self, device: int, *, is_capturable: bool) -> None:
        self._device = device
        self._is_capturable = is_capturable
        self._of_window = 0  # the capture that the open window is part of; until that ends or is forgotten
        self._of_kept = 0  # the capture that has brought what `no_sync` keeps; until the window ends or it is forgotten
        self._has_grads = False  # whether p.grad stands for what a captured window has brought; set by each window
        self._has_any = False  # whether a window was captured from its begin to its end; stays

    def begin(self, *, is_learnt: bool, has_grads: bool, has_plain: bool) -> bool:
        """A window begins; whether it is captured. ``has_grads``: it adds to gradients that there are; ``has_plain``: some are
        not in any bucket yet."""
        now = self._expect_alive()
        if now:
            self._expect_capturable("gradients")
            if not is_learnt:
                raise CaptureError(
                    "the first gradients came under CUDA graph capture: run a whole step before the capture, so that "
                    "the ranks agree on the parameters with gradients"
                )
            self.expect_own_grads(has_grads, has_plain)
        self._of_window = now
        self._has_grads = now != 0
        return self._has_grads

    def end(self) -> None:
        """The window has ended, and with it what `no_sync` had kept."""
        self._has_any = self._has_any or self._of_window != 0
        self._of_window = self._of_kept = 0

    def keep(self) -> None:
        """`no_sync` has left gradients."""
        self._of_kept = core.capture_id(self._device)
        self._has_grads = self._of_kept != 0

    def forget(self) -> bool:
        """Nothing is kept any more. Whether the open window, or what was kept, was part of a capture that is over;
        forgets it."""
        is_lost = self._is_lost(core.capture_id(self._device))
        self._of_kept = 0
        if is_lost:
            self._of_window = 0
        return is_lost

    def _is_lost(self, now: int) -> bool:
        return self._of_window not in (0, now) or self._of_kept not in (0, now)

    def _expect_alive(self) -> int:
        """The capture that goes on, or 0. CaptureError where gradients were part of another one, or of one that is over."""
        now = core.capture_id(self._device)
        if self._is_lost(now):
            raise CaptureError(
                "a CUDA graph captured a backward but not the end of its sync window (the capture failed, or ended "
                "before step, clip_grad_norm_ or grad_sync): the gradients of that backward are lost; call zero_grad "
                "on all ranks"
            )
        return now

    def ask(self, what: str, *, is_open: bool) -> bool:
        """Whether the call ``what`` is captured, which is about the gradients of the open window if there is one.

        CaptureError if it may not be captured, or if the window began before the capture.
        """
        now = self._expect_alive()
        if now and is_open and not self._of_window:
            raise CaptureError(
                "the gradients of a backward before the CUDA graph capture are still being reduced: call step, or "
                "grad_sync and zero_grad, before the capture"
            )
        if now and not is_open:
            self._expect_capturable(what)
        return now != 0

    def expect_none(self, what: str) -> None:
        """RuntimeError once there has been a captured window: ``what`` moves what its graph reads and writes."""
        if self._has_any:
            raise RuntimeError(
                f"{what} after a step was captured in a CUDA graph: the graph uses the addresses of step counts, "
                "shards and buckets, which would change; close this optimizer and make a new one of all parameters"
            )

    def expect_no_replay(self, what: str) -> None:
        """CaptureError where ``what`` needs gradients, finds none, and they may have come by a replay."""
        if self._has_any:
            raise CaptureError(
                f"{what} found no gradients: p.grad was dropped outside of the CUDA graph (zero_grad), and a replay "
                "does not restore p.grad; call zero_grad only inside the capture, with the backward, or run one whole "
                "step without the graph first"
            )

    def refuse_scaler(self) -> None:
        if core.is_capturing(self._device):
            raise CaptureError(
                "torch's GradScaler decides on the host whether to step, which cannot be captured: capture forward, "
                "backward and optimizer.grad_sync(), and call the scaler's unscale_, step and update after each "
                "replay"
            )

    def _expect_capturable(self, what: str) -> None:
        if not self._is_capturable:
            raise CaptureError(
                f"{what} under CUDA graph capture needs an optimizer made with capturable=True and static_graph=True"
            )

    def expect_own_grads(self, has_grads: bool, has_plain: bool) -> None:
        """CaptureError where a call that is captured would read gradients from outside: ``has_grads``, there are some in
        ``p.grad``; ``has_plain``: some that no window has taken, in memory that a replay would not find filled again."""
        if has_plain or (has_grads and not self._has_grads):
            raise CaptureError(
                "the gradients came before the CUDA graph capture, so a replay would not renew them: capture "
                "the whole step, from zero_grad and forward to step"
            )
