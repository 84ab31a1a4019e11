"""Systems that benchmarks compare ShadowServe with: started, filled, queried and verified in one way.

``contender`` says what that way is; ``sockets`` reads Redis, and the plain sockets that are everybody's limit;
``installed`` runs what scripts/setup-peers installs, through ``driver``, which runs in that environment; ``network``
is loopback, or two network namespaces with a link of a given rate between them.
"""
