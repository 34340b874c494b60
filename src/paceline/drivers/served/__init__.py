"""A cluster of real processes: a parameter server and its workers. Only this package knows sockets and TLS.

The world is connections, one per worker, in one event loop:

    messages     the protocol: kinds, headers, checks, and how vectors are cut into frames
    transport    a connection, TCP or TLS, as bytes: exact reads, writes that wait for the peer
    handover     shared memory for the workers on the server's own machine, in place of the bodies of messages
    admission    who may join on loopback without keys: a key in the run's folder, and tokens made with it
    stream       one worker's stream: which message may come when, how long it may take, what is sent to it next
    server       all streams, deadlines for all of them, and the model as frames
    times        step times of the workers, as they say and the server saw, and the server's own
    coordinator  the run without its network: events -> strategy -> steps, and a journal of both; pure but for torch
    membership   who has which seat (number and shard), and how far each has drawn: batches, and samples where batches
                 are by speed
    run          beside the rounds: measuring (a copy), checkpoints (in a thread), signals, the end
    connection   the worker's end of a stream; `worker` is what a user's script holds; `job` what a recipe's worker does
"""
