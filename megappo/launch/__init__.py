"""Several machines as one run: who takes part, whether they agree, and how all of them end.

`megappo launch` runs once on every node. `place` says which node this is (torchrun, Slurm or options), `meeting` is
where the nodes meet before there is any Ray, `facts` and `files` are what they compare there, `head` and `member` are
the two sides of it: node 0 starts a Ray head and the controller, the others join, and all end with the controller's
exit code. Scripts for people are in the folder `launch/` of the repository.

Imports Ray nowhere: what needs it is `megappo.cluster.node`. To add a launcher: a function in `place` that reads what
it tells a process.
"""
