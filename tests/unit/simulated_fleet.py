"""A fleet in a loop of 20 ms ticks: engines with blocks and steps, heartbeats, one router, clients that never rest."""

import random
from dataclasses import replace

from vtoken.core.desk import Desk
from vtoken.core.fleet import FleetView
from vtoken.core.routing import RouteHint, RoutingTunables
from vtoken.core.telemetry import Heartbeat, Snapshot

TICK_S, BEAT_TICKS, POLL_TICKS = 0.02, 5, 3
BLOCK, CAPACITY = 16, 200


class Engine:
    """One token per running request and tick; waits for blocks; the youngest is preempted when they run out."""

    def __init__(self):
        self.running, self.waiting, self.steps, self.preemptions = [], [], 0, 0

    def used(self):
        return sum(-(-request["held"] // BLOCK) for request in self.running)

    def tick(self):
        while self.waiting and self.used() + -(-(self.waiting[0]["held"] + 1) // BLOCK) <= CAPACITY:
            self.running.append(self.waiting.pop(0))
        if not self.running:
            return []
        self.steps += 1
        for request in self.running:
            request["held"] += 1
            request["left"] -= 1
        while self.used() > CAPACITY:
            self.waiting.insert(0, self.running.pop())
            self.preemptions += 1
        done = [request for request in self.running if request["left"] <= 0]
        self.running = [request for request in self.running if request["left"] > 0]
        return done

    def snapshot(self):
        used = self.used()
        return Snapshot(
            block_size_tokens=BLOCK, capacity_blocks=CAPACITY, free_blocks=CAPACITY - used, private_blocks=used,
            running_requests=len(self.running), waiting_requests=len(self.waiting), steps_total=self.steps,
            preemptions_total=self.preemptions,
        )  # fmt: skip


def all_free(snapshot):
    """The lie: nothing runs, everything is free; the steps go on."""
    return replace(snapshot, free_blocks=CAPACITY, private_blocks=0, running_requests=0, waiting_requests=0)


class World:
    """`faults`: replica -> (from tick, to tick, kind), kind one of lie, freeze, fail, lag, silence."""

    def __init__(self, count, clients, mode="room", faults=None, seed=0, tunables=None, poison=0.0):
        self.rng, self.poison = random.Random(seed), poison
        self.engines = {f"r{n}": Engine() for n in range(count)}
        self.names = list(self.engines)
        self.fleet = FleetView()
        self.desk = Desk(replace(tunables or RoutingTunables(), mode=mode), random.Random(seed + 1))
        self.faults = faults or {}
        self.clients, self.number, self.tick_number = clients, 0, 0
        self.frozen, self.sequence, self.late = {}, dict.fromkeys(self.names, 0), []
        self.sent = {name: [] for name in self.names}
        self.done_tokens = self.done = self.failed = 0
        self.history = []
        self.hints = {}

    def fault(self, name):
        begin, end, kind = self.faults.get(name, (0, 0, ""))
        return kind if begin <= self.tick_number < end else ""

    def run(self, ticks):
        for _ in range(ticks):
            self.step()
        return self

    def step(self):
        now_s = self.now_s()
        for name, engine in self.engines.items():
            for request in engine.tick():
                self.desk.ended(request["id"], name)
                self.desk.served(name, request["sent_s"], now_s)
                self.done += 1
                self.done_tokens += request["tokens"]
                self.clients += 1
        if self.tick_number % BEAT_TICKS == 0:
            for name in self.names:
                self.beat(name, now_s)
        for due, beat in [entry for entry in self.late if entry[0] <= self.tick_number]:
            self.late.remove((due, beat))
            self.fleet.heartbeat(beat, now_s)
        if self.tick_number % POLL_TICKS == 0:
            self.desk.take(self.fleet.columns(now_s, self.desk.membership), now_s)
        free, self.clients = self.clients, 0
        for _ in range(free):
            self.send(now_s)
        self.history.append({name: self.desk.trust().get(name, 1.0) for name in self.names})
        self.tick_number += 1

    def now_s(self):
        return 100.0 + self.tick_number * TICK_S

    def beat(self, name, now_s):
        kind, shot = self.fault(name), self.engines[name].snapshot()
        if kind == "freeze":
            shot = self.frozen.setdefault(name, shot)
        elif kind == "lie":
            shot = all_free(shot)
        elif kind == "silence":
            return
        self.sequence[name] += 1
        beat = Heartbeat(name, self.sequence[name], now_s, draining=False, snapshot=shot)
        if kind == "lag":
            self.late.append((self.tick_number + 25, beat))
        else:
            self.fleet.heartbeat(beat, now_s)

    def send(self, now_s):
        prompt, output = self.rng.choice([(32, 20), (64, 40), (400, 120)]), 0
        prompt, output = prompt
        hint = RouteHint(prompt, output)
        self.number += 1
        request_id = str(self.number)
        choice = self.desk.decide(self.names, hint, now_s)
        name = choice.replica_id
        self.desk.commit(choice, request_id, hint, now_s)
        self.desk.accepted(request_id, name, hint, now_s)
        self.sent[name].append(self.tick_number)
        poisoned = self.rng.random() < self.poison if self.poison else False
        if poisoned or self.fault(name) == "fail":
            self.desk.ended(request_id, name)
            self.desk.failed(name, now_s, "poison" if poisoned else "fault")
            self.failed += 1
            self.clients += 1
            return
        self.engines[name].waiting.append(
            {"id": request_id, "held": prompt, "left": output, "tokens": prompt + output, "sent_s": now_s}
        )

    def share(self, name, begin, end):
        inside = {key: sum(begin <= tick < end for tick in ticks) for key, ticks in self.sent.items()}
        return inside[name] / max(1, sum(inside.values()))
