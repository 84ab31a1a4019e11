"""Memory and SSDs as one store: a library, without sockets, of which a program has one or several (docs/pool.md).

``store`` says what may be asked of a pool, in the words of ``terms``, and ``pool`` answers; ``config`` says what a
pool is made of. Each device is a volume of its own: the room ``volume/`` knows one device and what survives on it, and
nothing of this one. This room knows what several of them and memory make together:

- ``values`` finds, takes and changes one value at a time.
- ``opening`` opens devices and recovers what is on them, ``tenants`` know whose it is, ``keys`` what the index calls
  it, ``sessions`` which devices took part, and ``core`` is what all parts share: index, memory, devices, and how an
  entry goes.
- Where an object goes: ``organizer`` measures bandwidths and gives shares, ``placement`` deals them out along each
  chain of chunks, ``homes`` chooses the device, ``admission`` and ``wear`` say what is written at all, and how much a
  day.
- What goes for it: ``space``, with ``weights`` of who has most and ``pins`` of who keeps what; ``clears`` is what was
  cleared and goes bit by bit; ``bounds`` changes what may be held.
- Where there are no devices, ``heap`` has the values, each in memory of its own (``buffers``).
- How bytes travel: ``arena`` is memory that is received into, read into and sent from (``registration`` tells devices
  of it), ``copies`` what stays there; ``writes``, by the states of ``writing``, and ``reads``; ``disk`` is one device
  with its failures and its log. ``wake`` has the pool's thread look after all of it.
- ``scrub`` checks what nobody asks for, ``quarantine`` tests extents that failed, ``scanning`` walks through the keys,
  ``reports`` and ``statistics`` tell of it all. ``ordered`` keeps things in order, however many they are.
"""

__all__: list[str] = []
