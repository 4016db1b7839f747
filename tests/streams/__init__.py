"""A race detector: training steps run on a device that is none, and all that could go wrong between
streams, the host and process groups is reported.

    clocks        agents with vector clocks, and what has been done to which bytes
    allocator     memory of the device, given out again on the stream that freed it
    device        streams, events, and what `torch.get_device_module` finds
    watching      every operation: which agent reads and writes which bytes
    groups        collectives: one agent for each process group
    simulation    all of it together, around fake tensors
    training      models and steps; `scenarios` and `controls` use them
    mutants       the library with one wait, record, event or ordered copy less
"""
