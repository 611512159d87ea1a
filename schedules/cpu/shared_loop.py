"""A loop that the threads of a parallel region share, and waiting for one, in LLVM IR: TIR has no
atomic operations.

Every thread has a share of the iterations, which it does a few at a time; then it takes from what
is left of the others' shares. Who needs the results waits until all iterations are done, not for
the other threads: one that the system has put aside for another program delays the rest only by
what it holds, and faster cores do more of the work.

Where a share stands is one word of its owner's cache line, (number of the loop, iterations taken),
so that taking one's own costs no traffic between cores. Loops are numbered in the order in which
threads come to them: a word with a lower number is a share that nobody has begun, one with a higher
number means that this loop is done.

Waiting spins, some 0.1 µs where all threads run; after `_SPINS` rounds the thread offers its core
to others at every round.
"""

from typing import Any

from tvm.script import tirx as T
from tvm.tirx.script import builder as B

LINE_BYTES = 64
MAX_THREADS = 256
_SPINS = 20_000
_ALL_DONE = 1 << 30
_PAUSES = {
    "x86": ("declare void @llvm.x86.sse2.pause()", "call void @llvm.x86.sse2.pause()"),
    "arm": ("declare void @llvm.aarch64.hint(i32)", "call void @llvm.aarch64.hint(i32 1)"),
}


def llvm_source(is_arm: bool) -> str:
    """LLVM IR of the functions that the emitters below call."""
    declaration, pause = _PAUSES["arm" if is_arm else "x86"]
    return f"""
{declaration}
declare i32 @sched_yield()

define i32 @everycast_take(ptr %share, i32 %loop, i32 %size, i32 %count) {{
entry:
  %seen = load atomic i64, ptr %share monotonic, align 8
  br label %try
try:
  %word = phi i64 [ %seen, %entry ], [ %changed, %exchange ]
  %high = lshr i64 %word, 32
  %number = trunc i64 %high to i32
  %low = trunc i64 %word to i32
  %begun = icmp eq i32 %number, %loop
  %first = select i1 %begun, i32 %low, i32 0
  %over = icmp ugt i32 %number, %loop
  %empty = icmp sge i32 %first, %size
  %none = or i1 %over, %empty
  br i1 %none, label %nothing, label %exchange
exchange:
  %next = add i32 %first, %count
  %next64 = zext i32 %next to i64
  %loop64 = zext i32 %loop to i64
  %shifted = shl i64 %loop64, 32
  %new = or i64 %shifted, %next64
  %pair = cmpxchg ptr %share, i64 %word, i64 %new monotonic monotonic
  %changed = extractvalue {{ i64, i1 }} %pair, 0
  %took = extractvalue {{ i64, i1 }} %pair, 1
  br i1 %took, label %leave, label %try
nothing:
  ret i32 -1
leave:
  ret i32 %first
}}

define i32 @everycast_finish(ptr %done, i32 %count, i32 %extent) alwaysinline {{
entry:
  %before = atomicrmw add ptr %done, i32 %count acq_rel
  %now = add i32 %before, %count
  %last = icmp eq i32 %now, %extent
  br i1 %last, label %all, label %leave
all:
  store atomic i32 {_ALL_DONE}, ptr %done release, align 4
  br label %leave
leave:
  ret i32 0
}}

define i32 @everycast_wait(ptr %done) noinline {{
entry:
  br label %look
look:
  %i = phi i32 [ 0, %entry ], [ %j, %wait ], [ %i, %offer ]
  %now = load atomic i32, ptr %done acquire, align 4
  %ready = icmp eq i32 %now, {_ALL_DONE}
  br i1 %ready, label %leave, label %choose
choose:
  %long = icmp sge i32 %i, {_SPINS}
  br i1 %long, label %offer, label %wait
wait:
  {pause}
  %j = add i32 %i, 1
  br label %look
offer:
  %ignored = call i32 @sched_yield()
  br label %look
leave:
  ret i32 0
}}
"""


def emit_take(share: Any, loop: Any, size: Any, count: Any) -> Any:
    """Take `count` iterations of a share of `size`: the first of them, int64, or -1 if there is
    none.

    `share` is the address of the int64 word of the share's owner, `loop` the number of the loop,
    from 1 on.
    """
    values = (T.Cast("int32", value) for value in (loop, size, count))
    return T.Cast("int64", T.call_extern("int32", "everycast_take", share, *values))


def emit_finish(done: Any, count: Any, extent: Any) -> None:
    """Add to the int32 at `done` that `count` more iterations of `extent` are done."""
    values = (T.Cast("int32", count), T.Cast("int32", extent))
    B.evaluate(T.call_extern("int32", "everycast_finish", done, *values))


def emit_wait(done: Any) -> None:
    """Wait until every iteration is done."""
    B.evaluate(T.call_extern("int32", "everycast_wait", done))
