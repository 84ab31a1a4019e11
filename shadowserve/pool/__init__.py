"""Memory and SSDs as one store: a library, without sockets. ``README.md`` beside this file says what is where."""
