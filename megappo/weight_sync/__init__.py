"""Transports that hand trained weights to engines.

Owns: the trainer's end (`transport`, `source`, `broadcast`, `ipc`, `disk`), the conversion of dtypes on the way, and
the order of what an engine is asked (`receive`). Must not import train, rollout or ray. To add a transport: implement
`WeightSender` with a constructor that takes a `SenderSpec`, register it with its flow in `TRANSPORTS` (here) and by
name in `megappo.config.name_rules`, and teach the engines its `Delivery` if it is a new one; the contract test in
tests/rollout runs over both registries.
"""

from megappo.registry import Registry
from megappo.weight_sync.broadcast import BroadcastSender
from megappo.weight_sync.disk import DiskSender
from megappo.weight_sync.ipc import SharedMemorySender
from megappo.weight_sync.transport import Flow, Transport

TRANSPORTS: Registry[Transport] = Registry("weight transport")
TRANSPORTS.register("broadcast", Transport(flow=Flow.streamed, sender=BroadcastSender))
TRANSPORTS.register("ipc", Transport(flow=Flow.handed, sender=SharedMemorySender))
TRANSPORTS.register("disk", Transport(flow=Flow.stored, sender=DiskSender))
