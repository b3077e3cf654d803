"""The ops as ``torch.ops.dspark.*``: what ``torch.compile`` and ``torch.export`` see of them.

Each writes into tensors that its caller allocates, so its fake implementation has nothing to do. An eager call does not
pass through here: the dispatcher would cost more than the checks and the launch together.
"""
