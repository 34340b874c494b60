"""A page in the browser that follows a run's folder while the run goes on, and its figures for Prometheus.

    tail      the new whole lines of a file that another process appends to
    state     what the records of a journal and of step times come to: bounded, whatever the length of the run
    folder    one run's folder, followed: which files it has, and whether their writer still lives
    metrics   the state in the text format of Prometheus
    page      the page itself: one file, which asks nobody but its own address
    server    HTTP and server-sent events, for readers on this machine, or for those who have the token
    beside    the page of a run that has just been started, as a child process that ends with it

Nothing here writes to the folder, takes a lock in it or talks to the run: a run does not know that it is followed.
"""
