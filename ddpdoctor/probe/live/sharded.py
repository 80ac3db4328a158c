"""The forwards of sharded modules, as phases of a step, and that their collectives count in backward, too."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from threading import get_ident
from types import ModuleType
from typing import Any

from ..torch_compat import SHARDED_STATES, after_import
from .observer import Observer

_now_ns = time.monotonic_ns


class ShardedForwards:
    """Replacements of what ``fully_shard`` runs before and after the forward of a module."""

    def __init__(self, observer: Observer, torch: Any, is_compiling: Callable[[], bool]) -> None:
        self._observer = observer
        self._is_compiling = is_compiling
        self._is_recording: Callable[[], bool] = torch.is_grad_enabled

    def install(self) -> None:
        """Hook the class once torch's module is imported, which few scripts do."""
        for name in SHARDED_STATES:
            after_import(name, self._hook)

    def _hook(self, module: ModuleType) -> None:
        state_class = getattr(module, "FSDPState", None)
        if state_class is None or not hasattr(state_class, "_root_pre_forward"):
            return
        enter, leave = state_class._pre_forward, state_class._post_forward
        observer, is_recording = self._observer, self._is_recording
        keep, began, ended = observer.moments.keep, observer.course.forward_began, observer.watch.leave

        @functools.wraps(enter)
        def _pre_forward(state: Any, *arguments: Any, **options: Any) -> Any:
            try:
                # Only of the outermost module: those inside of it are a part of its forward.
                if self._is_watched() and state._state_ctx.iter_forward_root is None:
                    observer.shards = True
                    keep((began, is_recording(), state._modules[0].training, _now_ns()))
                    observer.moments.make_room()
            except Exception as error:
                observer.fault("forward", error, harms=("step_tracks",))
            return enter(state, *arguments, **options)

        @functools.wraps(leave)
        def _post_forward(state: Any, *arguments: Any, **options: Any) -> Any:
            is_root = False
            try:
                is_root = self._is_watched() and state._state_ctx.iter_forward_root is state
            except Exception as error:
                observer.fault("forward", error, harms=("step_tracks",))
            result = leave(state, *arguments, **options)
            if is_root:
                keep((ended, _now_ns()))
            return result

        state_class._pre_forward, state_class._post_forward = _pre_forward, _post_forward

    def _is_watched(self) -> bool:
        observer = self._observer
        return observer.thread == get_ident() and not observer.backwards and not self._is_compiling()
