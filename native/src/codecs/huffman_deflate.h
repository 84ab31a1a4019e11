/* SPDX-License-Identifier: Apache-2.0 */
/* huffman_deflate.h - a Huffman-only encoder of raw Deflate; see huffman_deflate.c */
#ifndef SS_HUFFMAN_DEFLATE_H
#define SS_HUFFMAN_DEFLATE_H

#include "shadowserve.h"

/* ss_huffman_deflate_bound() returns the most bytes that 'size' bytes can become. */
size_t ss_huffman_deflate_bound(size_t size);

/*
 * ss_huffman_deflate() encodes 'size' bytes as one raw Deflate stream. Returns SS_NO_SPACE when the stream does not
 * fit 'target_size', else SS_OK and its length in '*written'. Allocates nothing.
 */
enum ss_result ss_huffman_deflate(const uint8_t *source, size_t size, uint8_t *target, size_t target_size,
                                  size_t *written);

#endif /* SS_HUFFMAN_DEFLATE_H */
