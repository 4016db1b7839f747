"""What needs a device, and runs without one as far as it can.

    setups        process groups of ranks on one device or several
    real          scenarios of `tests/streams` with real tensors, and results that are compared
    __main__      `make test-gpu`: all tests marked gpu, then the sanitizers that are installed

Everything here takes the device as an argument, and the CPU is one: the default run takes a sample
there, so that no code runs for the first time on somebody's GPU.
"""
