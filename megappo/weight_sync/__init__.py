"""Transports that hand trained weights to engines.

Owns: the trainer's end (`transport`, `broadcast`) and the order of a hand-over (`push`). Must not import train, rollout
or ray. To add a transport: implement `WeightSender` with a constructor that takes a `SenderSpec`, register it in
`TRANSPORTS` (here), and teach the engines its receiving end; the contract test in tests/rollout runs over both
registries.
"""

from megappo.registry import Registry
from megappo.weight_sync.broadcast import BroadcastSender
from megappo.weight_sync.transport import SenderFactory

TRANSPORTS: Registry[SenderFactory] = Registry("weight transport")
TRANSPORTS.register("broadcast", BroadcastSender)
