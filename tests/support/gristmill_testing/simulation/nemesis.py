"""What goes wrong, and when: chosen by the seed alone."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from gristmill_contracts.ids import SessionUid
from gristmill_testing.simulation.doors import Gateway
from gristmill_testing.simulation.network import Weather
from gristmill_testing.simulation.pods import Pod
from gristmill_testing.simulation.traps import ANSWERED, BATCH, INBOX_ACK, RELEASED

if TYPE_CHECKING:
    from gristmill_testing.simulation.world import World

RESTORED_ABOVE = 0.75
"""Of a seed's one draw: in the others the ledger never comes back from a backup."""


class Nemesis:
    """`rage` for the planned time, then `calm`."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.rng = world.rng
        self._once = self.rng.random()
        """At most one of the rare disasters in a run: they excuse what others must not."""
        self._struck = False
        self._calm = False

    async def rage(self) -> None:
        world = self.world
        world.net.weather = self._weather()
        world.note("weather", world.net.weather)
        pause_s = self.rng.uniform(0.3, 4.0)
        end = world.loop.now + world.plan.chaos_s
        faults = self._faults()
        if "kill_meter_at_ack" in faults and self.rng.random() < 0.5:
            self._kill_meter_at_ack()  # What clients begin with often goes into the inbox.
        while world.loop.now < end:
            await asyncio.sleep(self.rng.expovariate(1 / pause_s))
            names = list(faults)
            name = self.rng.choices(names, [faults[each][0] for each in names])[0]
            world.note("fault", name)
            faults[name][1]()

    def _weather(self) -> Weather:
        bad = self.rng.random()
        return Weather(
            lose_request=bad * 0.10,
            lose_answer=bad * 0.10,
            double=bad * 0.10,
            cut=bad * 0.05,
            delay_s=self.rng.choice([0.002, 0.02, 0.2]),
            slow=self.rng.choice([0.0, 0.05]),
        )

    def _faults(self) -> dict[str, tuple[float, Callable[[], None]]]:
        """Name -> (weight, what to do). Each seed leaves some out, so that others show."""
        known: dict[str, tuple[float, Callable[[], None]]] = {
            "kill_meter": (3, self._kill_meter),
            "kill_meter_at_step": (3, self._kill_meter_at_step),
            "power_at_disk": (4, self._power_at_disk),
            "power": (1, lambda: self.world.keeper.power_lost(self._pod())),
            "kill_worker": (2, lambda: self.world.keeper.kill_worker(self._pod())),
            "kill_ledger": (2, self._kill_ledger),
            "kill_ledger_at_statement": (3, self._kill_ledger_at_statement),
            "kill_gateway": (2, self._kill_gateway),
            "part": (3, self._part),
            "fail_fsync": (1, self._fail_fsync),
            "full": (0.5, self._fill),
            "backup": (0.5, self._backup),
            "power_at_release": (1, self._power_at_release),
            "kill_ledger_at_answer": (2, self._kill_ledger_at_answer),
            "kill_meter_at_ack": (2, self._kill_meter_at_ack),
            "deaf": (0.5, lambda: self._gateway().go_deaf(self.rng.random() * 20)),
        }
        kept = {name: fault for name, fault in known.items() if self.rng.random() < 0.7}
        if self.rng.random() < 0.15:
            kept["stop"] = (1, self._stop)
        if not self.world.plan.embedded and self.rng.random() < 0.6:
            kept["take_over"] = (2, self._take_over)
        if self._once < 0.12 and not self.world.plan.embedded:
            kept["destroy"] = (2, self._destroy)
        elif self._once > RESTORED_ABOVE:
            kept["backup"] = (2, self._backup)
            kept["restore"] = (2, self._restore_soon)
        return kept or {"kill_meter": known["kill_meter"]}

    def calm(self) -> None:
        """Everything that failed works from here on."""
        world = self.world
        world.net.weather = Weather()
        world.net.heal()
        self._calm = True
        world.traps.clear()
        world.books.statements_left = None
        if world.books.process is not None:
            world.books.process.steps_left = None
        self._revive_ledger()
        for gateway in world.gateways:
            if gateway.process is not None:
                gateway.process.steps_left = None
                if gateway.process.dead:
                    gateway.start()
        world.keeper.revive_all()

    def strike_late(self) -> None:
        """A ledger may come back from its backup when no session has anything to post any more."""
        if self._once > RESTORED_ABOVE:
            self._restore()

    # --- who -------------------------------------------------------------------------------------

    def _pod(self) -> Pod:
        pods = list({id(pod): pod for pod in self.world.keeper.pods.values()}.values())
        return self.rng.choice(pods)

    def _gateway(self) -> Gateway:
        return self.rng.choice(self.world.gateways)

    # --- faults ----------------------------------------------------------------------------------

    def _kill_meter(self) -> None:
        self.world.keeper.kill_meter(self._pod())

    def _kill_meter_at_step(self) -> None:
        pod = self._pod()
        process = pod.meter_process
        if process is None or process.dead or process.steps_left is not None:
            return
        process.steps_left = self.rng.randint(1, 120)

        def died() -> None:
            if not pod.over:
                pod.volume.killed()
                self.world.keeper.meter_died(pod)

        process.on_death.append(lambda: died() if process.steps_left is not None else None)

    def _power_at_disk(self) -> None:
        pod = self._pod()
        if not pod.over and pod.volume.power_left is None:
            pod.volume.power_left = self.rng.randint(0, 12)

    def _kill_ledger(self) -> None:
        if self.world.books.process is not None:
            self.world.books.process.kill()
        self.world.later(0.1 + self.rng.random() * 4, self._revive_ledger)

    def _kill_ledger_at_statement(self) -> None:
        books = self.world.books
        books.statements_left = self.rng.randint(0, 25)
        if books.process is not None and not books.process.dead:
            books.process.on_death.append(
                lambda: self.world.later(0.1 + self.rng.random() * 2, self._revive_ledger)
            )

    def _revive_ledger(self) -> None:
        books = self.world.books
        if books.process is None or books.process.dead:
            books.start()

    def _power_at_release(self) -> None:
        """A machine goes off when a result has just left it."""
        world = self.world
        world.traps.arm(
            RELEASED,
            lambda uid: world.later(
                0.0, world.keeper.power_lost, world.keeper.pods[SessionUid(uid)]
            ),
        )

    def _kill_ledger_at_answer(self) -> None:
        """It dies when it has just said that something is done; once, or again when it is back."""
        for _ in range(self.rng.randint(1, 3)):
            self.world.traps.arm(self.rng.choice(ANSWERED), lambda _uid: self._kill_ledger())

    def _kill_meter_at_ack(self) -> None:
        """What was taken out of the inbox is in the log, and the ledger does not hear of it."""
        world = self.world
        world.traps.arm(
            INBOX_ACK,
            lambda uid: world.keeper.kill_meter(world.keeper.pods[SessionUid(uid)]),
        )

    def _kill_gateway(self) -> None:
        gateway = self._gateway()
        if gateway.process is not None:
            gateway.process.kill()

        def revive() -> None:
            if gateway.process is not None and gateway.process.dead:
                gateway.start()

        self.world.later(0.1 + self.rng.random() * 2, revive)

    def _part(self) -> None:
        """Two hosts do not hear one another for a while."""
        net, pod = self.world.net, self._pod()
        pairs = [(pod.name, "ledger"), *((pod.name, g.name) for g in self.world.gateways)]
        chosen = [self.rng.choice(pairs)] if self.rng.random() < 0.6 else pairs
        for pair in chosen:
            net.part(*pair)
        length_s = self.rng.choice([1.0, 6.0, 25.0]) * self.rng.random()

        def heal() -> None:
            for pair in chosen:
                net.parted.discard(frozenset(pair))

        self.world.later(length_s, heal)

    def _fail_fsync(self) -> None:
        self._pod().volume.disk.fail_fsyncs = self.rng.randint(1, 2)

    def _fill(self) -> None:
        disk = self._pod().volume.disk
        disk.free = self.rng.randint(0, 400)

        def drain() -> None:
            disk.free = 2**40

        self.world.later(self.rng.random() * 6, drain)

    def _take_over(self) -> None:
        """The next attempt starts. Often because nothing was heard of the one before, which lives on."""
        uid = self.rng.choice(list(self.world.names))
        if self.rng.random() < 0.4:
            self.world.keeper.take_over(uid)
            return
        net, pair = self.world.net, (self.world.keeper.pods[uid].name, "ledger")
        length_s = 1 + self.rng.random() * 10
        net.part(*pair)
        self.world.later(length_s, net.parted.discard, frozenset(pair))
        if self.rng.random() < 0.6:
            self._gateway().go_deaf(length_s + self.rng.random() * 5)

        def take_over() -> None:
            if not self._calm:
                self.world.keeper.take_over(uid)

        self.world.later(length_s * self.rng.random(), take_over)

    def _stop(self) -> None:
        """Somebody ends a session while its client works."""
        uid = self.rng.choice(list(self.world.names))
        self.world.cut_short.add(uid)
        self.world.keeper.stop(uid)

    def _destroy(self) -> None:
        if self._struck:
            return
        self._struck = True
        uids = list(self.world.names)
        alive = self.rng.random() < 0.5
        self.world.keeper.destroy_volume(self.rng.choice(uids), alive=alive)

    def _backup(self) -> None:
        if self.world.books.backup is None and not self.world.books.raw.in_transaction:
            self.world.books.backup = self.world.books.save()

    def _restore_soon(self) -> None:
        """Now, or when it has just taken usage: then there is more under way."""
        if self.rng.random() < 0.4:
            self._restore()
        else:
            self.world.traps.arm(BATCH, lambda _uid: self._restore())

    def _restore(self) -> None:
        """The ledger comes back as it was when the backup was made."""
        books = self.world.books
        if books.backup is None or self._struck:
            return
        self._struck = True
        books.restored = True
        self.world.audit.restored()
        if books.process is not None:
            books.process.kill()
        books.load(books.backup)
        self.world.later(0.1 + self.rng.random() * 2, self._revive_ledger)
