"""The simulator's engine once more, as simply as it can be written: lists, dicts, no compiled code.

Blocks are numbers in lists; the prefix cache is a dict from block to content, in the order in which blocks were filled;
content is the tuple of all tokens up to a block's end. Written from vLLM's rules, not from the compiled loops.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vtoken.simulate.steptime import StepTime, chunk_work, step_seconds


@dataclass(eq=False)
class Request:
    name: int
    ready_s: float
    prompt: list
    output: int
    tokens: list = field(default_factory=list)
    blocks: list = field(default_factory=list)
    computed: int = 0
    preempted: int = 0
    first_s: float = -1.0
    end_s: float = -1.0

    def __post_init__(self):
        self.tokens = list(self.prompt)


class SlowEngine:
    def __init__(self, blocks: int, size: int, max_batched: int, max_running: int, caching: bool, time: StepTime):
        self.blocks, self.size, self.max_batched, self.max_running = blocks, size, max_batched, max_running
        self.caching, self.time = caching, time
        self.free = list(range(1, blocks + 1))
        self.refs = dict.fromkeys(self.free, 0)
        self.content: dict[int, tuple] = {}
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.failed: list[Request] = []
        self.preemptions = self.steps = 0

    # ---- blocks

    def cached(self, content):
        return next((block for block, known in self.content.items() if known == content), None)

    def take(self, count):
        taken, self.free = self.free[:count], self.free[count:]
        for block in taken:
            self.content.pop(block, None)
            self.refs[block] = 1
        return taken

    def drop_all(self, request):
        for block in request.blocks:
            self.refs[block] -= 1
        left = [block for block in reversed(request.blocks) if not self.refs[block]]
        empty = [block for block in left if block not in self.content]
        self.free = empty + self.free + [block for block in left if block in self.content]
        request.blocks = []

    def hits(self, request):
        found = []
        while self.caching and (len(found) + 1) * self.size < len(request.tokens):
            block = self.cached(tuple(request.tokens[: (len(found) + 1) * self.size]))
            if block is None:
                break
            found.append(block)
        return found

    def missing(self, request, tokens):
        return max(0, -(-(request.computed + tokens) // self.size) - len(request.blocks))

    def grow(self, request, tokens):
        old = len(request.blocks)
        request.blocks += self.take(self.missing(request, tokens))
        for index in range(max(0, old - 1), len(request.blocks)):
            end = (index + 1) * self.size
            content, block = tuple(request.tokens[:end]), request.blocks[index]
            if self.caching and end <= request.computed + tokens:
                self.content.setdefault(block, content)

    # ---- a step

    def schedule(self, now_s):
        scheduled, preempted = self.schedule_running()
        if not preempted:
            self.admit(now_s, scheduled)
        return scheduled

    def schedule_running(self):
        budget, scheduled, preempted = self.max_batched, {}, False
        for request in list(self.running):
            if request not in self.running:
                continue
            tokens = min(len(request.tokens) - request.computed, budget)
            while tokens and self.missing(request, tokens) > len(self.free):
                preempted = True
                victim = self.running.pop()
                self.drop_all(victim)
                victim.computed, victim.preempted = 0, victim.preempted + 1
                self.preemptions += 1
                self.waiting.insert(0, victim)
                if victim is request:
                    return scheduled, True
            if tokens:
                self.grow(request, tokens)
                scheduled[request] = tokens
            budget -= tokens
        return scheduled, preempted

    def admit(self, now_s, scheduled):
        budget = self.max_batched - sum(scheduled.values())
        while budget and len(self.running) < self.max_running and self.waiting:
            request = self.waiting[0]
            if request.ready_s > now_s:
                break
            if -(-(len(request.tokens) + 1) // self.size) > self.blocks:
                self.failed.append(self.waiting.pop(0))
                continue
            hits = self.hits(request)
            cold = sum(not self.refs[block] for block in hits)
            if -(-len(request.tokens) // self.size) - len(hits) + cold > len(self.free):
                break
            self.running.append(self.waiting.pop(0))
            for block in hits:
                if not self.refs[block]:
                    self.free.remove(block)
                self.refs[block] += 1
            request.blocks, request.computed = list(hits), len(hits) * self.size
            tokens = min(len(request.tokens) - request.computed, budget)
            self.grow(request, tokens)
            scheduled[request] = tokens
            budget -= tokens

    def seconds(self, scheduled):
        decoding = [request for request, tokens in scheduled.items() if tokens == 1]
        chunks = [(request.computed, tokens) for request, tokens in scheduled.items() if tokens > 1]
        heads = sum(request.computed + tokens == len(request.tokens) for request, tokens in scheduled.items())
        return step_seconds(
            self.time, len(decoding), float(sum(request.computed for request in decoding)),
            sum(tokens for _, tokens in chunks), float(sum(chunk_work(*chunk) for chunk in chunks)), heads,
        )  # fmt: skip

    def run(self, requests):
        self.waiting, now_s = sorted(requests, key=lambda request: request.ready_s), 0.0
        while self.waiting or self.running:
            scheduled = self.schedule(now_s)
            if not scheduled:
                if self.waiting and not self.running:
                    now_s = max(now_s, self.waiting[0].ready_s)
                continue
            now_s += self.seconds(scheduled)
            self.steps += 1
            for request, tokens in scheduled.items():
                request.computed += tokens
                if request.computed < len(request.tokens):
                    continue
                request.tokens.append((request.name, len(request.tokens)))
                request.first_s = now_s if request.first_s < 0 else request.first_s
                if len(request.tokens) == len(request.prompt) + request.output:
                    request.end_s = now_s
                    self.running.remove(request)
                    self.drop_all(request)
