"""What the crew needs of Ray, done at once in this process: for tests where Ray is not installed.

The tests with the mark `ray` run the same stories on Ray itself.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from lsuv_cli.workers.cluster import Cluster, Slot


class ActorError(Exception):
    """An actor is gone."""


class TaskError(Exception):
    """A call raised."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Never(Exception):
    """What this engine never raises."""


@dataclass(eq=False)
class Reference:
    value: Any = None
    problem: Exception | None = None


@dataclass(eq=False)
class Actor:
    """An object whose calls are written down and done at once; it is lost at a call that `lost_at` names."""

    engine: Engine
    number: int
    inner: Any
    gone: bool = False

    def __getattr__(self, name: str) -> Any:
        def remote(*given: Any) -> Reference:
            return self.engine.call(self, name, given)

        method = SimpleNamespace(remote=remote)
        method.options = lambda **_: method
        return method


@dataclass
class Engine:
    """A stand-in for the module `ray`. `lost_at`: names of calls, in turn, at which an actor is lost.

    Tasks see the files of this machine, unless they are `blind`.
    """

    lost_at: list[tuple[int, str]] = field(default_factory=list)  # number of the actor from 1, method
    room: int = 100  # actors that can be started at all
    calls: list[tuple[int, str]] = field(default_factory=list)
    put_bytes: list[int] = field(default_factory=list)
    started: int = 0
    blind: bool = False
    put_kinds: list[str] = field(default_factory=list)

    exceptions = SimpleNamespace(
        RayActorError=ActorError,
        ObjectLostError=Never,
        RayTaskError=TaskError,
        GetTimeoutError=TimeoutError,
        NodeDiedError=Never,
        WorkerCrashedError=Never,
        OutOfMemoryError=Never,
    )

    def remote(self, **_: Any) -> Any:
        def options(kind: Any) -> Any:
            if not isinstance(kind, type):
                return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=functools.partial(self._task, kind)))
            return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *given: self._start(kind, given)))

        return options

    def _start(self, kind: Any, given: tuple[Any, ...]) -> Actor:
        self.started += 1
        inner = kind(*given) if self.started <= self.room else None
        return Actor(self, self.started, inner)

    def _task(self, function: Any, *given: Any) -> Reference:
        """What Ray does with a task: everything is pickled on its way there and back."""
        if self.blind and function is os.path.exists:
            return Reference(False)
        words = pickle.loads(pickle.dumps([x.value if isinstance(x, Reference) else x for x in given]))
        try:
            return Reference(pickle.loads(pickle.dumps(function(*words))))
        except Exception as problem:
            return Reference(problem=TaskError(problem))

    def call(self, actor: Actor, name: str, given: tuple[Any, ...]) -> Reference:
        self.calls.append((actor.number, name))
        if actor.inner is None:
            return Reference(problem=TimeoutError())
        if (actor.number, name) in self.lost_at:
            self.lost_at.remove((actor.number, name))
            actor.gone = True
        if actor.gone:
            return Reference(problem=ActorError("it was killed"))
        try:
            return Reference(getattr(actor.inner, name)(*(x.value if isinstance(x, Reference) else x for x in given)))
        except Exception as problem:
            return Reference(problem=TaskError(problem))

    def put(self, value: Any) -> Reference:
        self.put_kinds.append(type(value).__name__)
        self.put_bytes.append(sum(array.nbytes for array in getattr(value, "tensors", {}).values()))
        return Reference(copy.deepcopy(value) if hasattr(value, "tensors") else value)  # scaled in place afterwards

    def get(self, reference: Reference | list[Reference], timeout: float | None = None) -> Any:
        if isinstance(reference, list):
            return [self.get(each) for each in reference]
        if reference.problem is not None:
            raise reference.problem
        return reference.value

    def wait(self, references: list[Reference], num_returns: int = 1, timeout: float | None = None) -> Any:
        return (references, []) if num_returns == len(references) else (references[:1], references[1:])

    def kill(self, actor: Actor) -> None:
        actor.gone = True


@contextlib.contextmanager
def installed(monkeypatch: Any, engine: Engine, threads: int = 1) -> Iterator[Engine]:
    """Have `workers=N` start N workers in this process."""

    @contextlib.contextmanager
    def opened(settings: Any) -> Iterator[Cluster]:
        yield Cluster(engine, [Slot(threads)] * settings.workers, lambda: None)

    with monkeypatch.context() as patch:
        patch.setattr("lsuv_cli.workers.crew.opened", opened)
        patch.setattr("lsuv_cli.workers.models.opened", opened)
        yield engine
