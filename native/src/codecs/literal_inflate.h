/* SPDX-License-Identifier: Apache-2.0 */
/* literal_inflate.h - a decoder of raw Deflate without matches, for several streams at a time; see literal_inflate.c */
#ifndef SS_LITERAL_INFLATE_H
#define SS_LITERAL_INFLATE_H

#include "shadowserve.h"

/* Streams that are decoded in turns; more of them wait for one to end. */
enum { SS_LITERAL_INFLATE_LANES = 3 };

struct ss_literal_inflater; /* what one thread needs, about 12 KiB for each lane: too much for a stack */

/* ss_literal_inflater_create() returns NULL without memory. Free it with free(). */
struct ss_literal_inflater *ss_literal_inflater_create(void);

/*
 * ss_literal_inflate() decodes each stream whose 'result' is SS_NOT_SUPPORTED. Where that is SS_OK afterwards, the
 * stream was valid, ended exactly where its source ends, and filled its target exactly. The others keep their result,
 * have anything in their targets, and are for a decoder of all of Deflate: they hold a match, or an error.
 */
void ss_literal_inflate(struct ss_literal_inflater *inflater, struct ss_stream *streams, size_t count);

#endif /* SS_LITERAL_INFLATE_H */
