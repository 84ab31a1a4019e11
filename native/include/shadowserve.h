/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shadowserve.h - the C core's public API
 *
 * The C core moves and transforms bytes; it makes no policy decisions and prints nothing. Python (shadowserve/native/)
 * is its only caller: it passes whole batches, owns every buffer, and turns the result codes into exceptions.
 *
 * native/cffi_build.py reads the declarations between the two cffi markers, so keep them plain: no macros but
 * SS_API, no #ifdef, no inline functions.
 */
#ifndef SHADOWSERVE_H
#define SHADOWSERVE_H

#include <stddef.h>
#include <stdint.h>

#ifndef SS_API
#define SS_API __attribute__((visibility("default")))
#endif

/* cffi:begin */
/* Result of every call that can fail. Values are stable; new ones go at the end. */
enum ss_result {
    SS_OK = 0,
    SS_BAD_DATA = 1,      /* the bytes do not decode, or decode to another length */
    SS_NO_SPACE = 2,      /* the output buffer is too small */
    SS_BAD_ARGUMENT = 3,  /* a caller's bug: sizes or offsets that do not fit each other */
    SS_NOT_SUPPORTED = 4, /* a codec that was not built in, an ISA that this CPU lacks */
    SS_NO_MEMORY = 5,
    SS_CHECKSUM = 6,      /* the bytes are not the ones that were checksummed */
    SS_NOT_FINITE = 7,    /* a value to quantize is infinite or NaN */
    SS_NOT_FOUND = 8,     /* the server does not hold the key, or not that range of it */
    SS_REFUSED = 9,       /* the server answered an error */
    SS_PROTOCOL = 10,     /* the server's answer is not RESP, or not of the length asked for */
    SS_DISCONNECTED = 11, /* the connection broke */
    SS_DEADLINE = 12,
    SS_CANCELLED = 13,
    SS_SKIPPED = 14,    /* not delivered, because an earlier chunk of its group failed */
    SS_OS_ERROR = 15,   /* a system call failed; errno says why */
    SS_DEVICE = 16,     /* an accelerator failed, also when the work was repeated, or it lost access to the memory */
    SS_REDIRECTED = 17, /* another node of the cluster has it: the server's answer says which */
};

enum ss_codec { SS_CODEC_NONE = 0, SS_CODEC_DEFLATE = 1, SS_CODEC_LZ4 = 2, SS_CODEC_ZSTD = 3, SS_CODEC_KVRANS = 4 };
enum ss_quantizer { SS_QUANTIZER_PASSTHROUGH = 0, SS_QUANTIZER_LOSSLESS = 1, SS_QUANTIZER_BINNED = 2 };
enum ss_dtype {
    SS_DTYPE_UINT8 = 0, /* bytes of any meaning */
    SS_DTYPE_FLOAT16 = 1,
    SS_DTYPE_BFLOAT16 = 2,
    SS_DTYPE_FLOAT32 = 3,
    SS_DTYPE_FLOAT8_E4M3 = 4 /* of OCP's 8-bit formats the one without infinities: up to 448, NaN is 0x7F and 0xFF */
};
enum ss_isa { SS_ISA_SCALAR = 0, SS_ISA_AVX2 = 1, SS_ISA_AVX512 = 2, SS_ISA_NEON = 3 };

/* Bumped when a declaration in this header changes incompatibly. */
SS_API uint32_t ss_abi_version(void);

/* ---- CPU dispatch -------------------------------------------------------------------------------------------- */

/* ss_isa_available() returns whether this build has kernels for 'isa' and this CPU can run them. */
SS_API int ss_isa_available(enum ss_isa isa);

/* ss_isa_active() returns the variant that the kernels use now: the best available, unless forced. */
SS_API enum ss_isa ss_isa_active(void);

/*
 * ss_isa_force() makes every kernel use 'isa' from now on; for tests and benchmarks. Returns SS_NOT_SUPPORTED, and
 * changes nothing, where it is not available. Not to be called while other threads run kernels.
 */
SS_API enum ss_result ss_isa_force(enum ss_isa isa);

/* ---- Checksum ------------------------------------------------------------------------------------------------ */

/* ss_crc32() continues the CRC-32 (IEEE 802.3, reflected, as zlib's crc32) 'crc' over 'size' bytes; start with 0. */
SS_API uint32_t ss_crc32(uint32_t crc, const void *data, size_t size);

/* ---- Codecs -------------------------------------------------------------------------------------------------- */

/*
 * ss_codec_implementation() names the library and version that decodes 'codec', such as "isa-l 2.30.0", in a static
 * string (for Deflate: all but what ss_compress() writes, for which there is a decoder of our own; for kvrans: the
 * kernels in use now, such as "own, avx512"); NULL where the codec was not built in. SS_CODEC_NONE, SS_CODEC_DEFLATE
 * and SS_CODEC_KVRANS are always there.
 */
SS_API const char *ss_codec_implementation(enum ss_codec codec);

/*
 * ss_compress_bound() returns the most bytes that ss_compress() writes for 'size' bytes of input; 0 where the codec was
 * not built in or 'size' is over its limit of about 2 GiB.
 */
SS_API size_t ss_compress_bound(enum ss_codec codec, size_t size);

/*
 * ss_compress() encodes 'size' bytes as one stream and stores its length in '*written'. Deflate is raw (RFC 1951),
 * Huffman-only: literals in dynamic blocks, or stored blocks where entropy coding gains nothing. kvrans
 * (docs/design/kvrans.md) takes the source as rows of 'row_length' bytes, a token's symbols, and has a table for each
 * kind of column; the other codecs ignore it. 0 where there are no rows. Fails with SS_NO_SPACE where 'target_size' is
 * under ss_compress_bound() and the stream did not fit, SS_NOT_SUPPORTED, SS_NO_MEMORY. Thread-safe.
 */
SS_API enum ss_result ss_compress(enum ss_codec codec, const void *source, size_t size, size_t row_length, void *target,
                                  size_t target_size, size_t *written);

/*
 * ss_decompress() decodes one whole stream to exactly 'target_size' bytes: one byte more or less in either direction
 * is SS_BAD_DATA. Never writes outside the target, never reads outside the source, whatever the source holds.
 * Thread-safe.
 */
SS_API enum ss_result ss_decompress(enum ss_codec codec, const void *source, size_t size, void *target,
                                    size_t target_size);

/* One of several streams that are decoded by one call. */
struct ss_stream {
    const void *source;
    void *target;
    size_t source_size; /* bytes */
    size_t target_size;
    enum ss_result result; /* out */
};

/*
 * ss_decompress_many() does the same for each of 'count' streams, whose targets do not overlap, and stores what became
 * of it in its 'result'; one that fails changes nothing for the others. Deflate streams without matches, which is what
 * ss_compress() writes, are decoded in turns, which is much faster than one after the other. Thread-safe.
 */
SS_API void ss_decompress_many(enum ss_codec codec, struct ss_stream *streams, size_t count);

/* ---- Quantizers ---------------------------------------------------------------------------------------------- */

/* ss_dtype_size() returns the bytes of one element, 0 for an unknown dtype. */
SS_API size_t ss_dtype_size(enum ss_dtype dtype);

/*
 * ss_quantize() turns 'vectors' x 'vector_length' elements of 'source' into symbols, the bytes that are compressed.
 *
 * SS_QUANTIZER_BINNED (ShadowServe section 5, after CacheGen): each vector is scaled by its largest magnitude into
 *   'bins'/2 - 1 steps on either side of zero; a symbol is an int8, one byte for each element, and '*scales' gets one
 *   float for each vector: value ~ symbol * scale. 'bins' is even, 4 to 256. An all-zero vector has scale 0,
 *   and so has one whose scale is too small to have a finite inverse (under about 2^-128): it counts as zero.
 *   Fails with SS_NOT_FINITE for an infinity or NaN.
 * SS_QUANTIZER_LOSSLESS: the bit pattern of each element is rotated left by one, so that the sign leaves the exponent,
 *   and split into byte planes over the whole call, most significant first; dtype-size bytes for each element, no
 *   scales. Exact for every bit pattern.
 * SS_QUANTIZER_PASSTHROUGH: a copy; no scales.
 *
 * 'scales' may be unaligned; 'bins' is ignored but for binned. Every ISA variant writes the same bytes.
 */
SS_API enum ss_result ss_quantize(enum ss_quantizer quantizer, enum ss_dtype dtype, uint32_t bins, const void *source,
                                  size_t vectors, size_t vector_length, uint8_t *symbols, void *scales);

/*
 * ss_dequantize() is the way back: exact for lossless and passthrough; symbol * scale in single precision, rounded to
 * nearest even in 'dtype', for binned (float8 takes its largest number, 448, for all that lies above it). Fails with
 * SS_BAD_DATA for a scale that is infinite or NaN. Every ISA variant writes the same bytes.
 */
SS_API enum ss_result ss_dequantize(enum ss_quantizer quantizer, enum ss_dtype dtype, const uint8_t *symbols,
                                    const void *scales, size_t vectors, size_t vector_length, void *target);

/* How the symbols of a stream become elements, and where these go. */
struct ss_elements {
    const void *scales; /* of binned: one float for every 'scale_vectors' vectors; may be unaligned */
    void *target;       /* vectors * vector_length elements; may be unaligned, but is faster at multiples of 64 bytes */
    size_t vectors;
    size_t vector_length;
    size_t scale_vectors; /* of binned: the last of them are perhaps fewer; 1 for the others */
    enum ss_quantizer quantizer;
    enum ss_dtype dtype;
};

/*
 * ss_decode_many() does what ss_decompress_many() and then ss_dequantize() do, for each of 'count' streams, and stores
 * what became of it in its 'result'. The target of a stream is a scratch for its symbols, of no meaning afterwards. So
 * are elements of a stream that failed. Elements are written past the caches where the CPU can do that, so it is for
 * those that are not soon read again; with kvrans, lossless ones and, on x86-64, binned ones of 16 bits are made as
 * they are decoded. What is written is the same. SS_BAD_ARGUMENT where sizes do not fit each other. Thread-safe.
 */
SS_API void ss_decode_many(enum ss_codec codec, struct ss_stream *streams, const struct ss_elements *elements,
                           size_t count);

/* ---- The pipeline -------------------------------------------------------------------------------------------- */

/*
 * One slice of one piece: the unit that is compressed, at most 2 MiB decoded (the accelerator's limit). Its stored
 * bytes are its scales, then its encoded stream.
 */
struct ss_slice {
    uint64_t offset;         /* of the stored bytes, from the first byte of the piece's body */
    uint64_t memory_offset;  /* of the dequantized bytes, from the first byte of the group's memory */
    uint32_t scales_length;  /* bytes: 4 for each scale of binned, else 0 */
    uint32_t encoded_length; /* bytes */
    uint32_t decoded_length; /* bytes of symbols */
    uint32_t checksum;       /* CRC-32 of the stored bytes */
    uint32_t decoded_crc32;  /* CRC-32 of the symbols (checked by accelerators, which return it for free) */
    uint32_t vectors;        /* tokens in the slice */
    uint32_t bins;           /* of binned, for ss_pipeline_encode(); a fetch needs none */
};

/* Where the body of a piece comes from, in a fetch. */
enum ss_origin {
    SS_ORIGIN_SERVER = 0,  /* a server, or a node of a cluster */
    SS_ORIGIN_MEMORY = 1,  /* memory of this process */
    SS_ORIGIN_AWAITED = 2, /* memory of this process, once ss_batch_supply() names the address */
    SS_ORIGIN_NOWHERE = 3  /* nowhere: it was awaited, and could not be read */
};

/*
 * One piece of a batch: consecutive layers of one chunk of one group, which lie in one record. When a record is stored,
 * the piece has all layers. Several pieces may belong to one record. The caller assigns each piece a region in every
 * buffer before the batch starts. Pieces must not share slices, and their regions must not overlap.
 */
struct ss_piece {
    uint8_t key[96]; /* of the record, as it goes over the wire */
    uint32_t key_length;
    enum ss_codec codec;
    uint32_t group;                /* index into the batch's groups */
    uint32_t chunk;                /* position in the group's chain of chunks, below UINT32_MAX */
    uint64_t record_offset;        /* of the body in the record: where the first slice's stored bytes begin */
    uint64_t body_length;          /* bytes of the body: all slices, in order and without gaps */
    uint64_t decompression_offset; /* in the decompression buffer, of a region of body_length bytes */
    uint64_t
        dequantization_offset; /* in the dequantization buffer, of a region of all decoded bytes; unused when fused */
    uint32_t slice_first;      /* index into the batch's slices */
    uint32_t slice_count;
    uint32_t node;   /* fetch: the node that has it, below the batch's 'node_count' */
    uint32_t asking; /* fetch: 1 to send ASKING first, after a cluster's node answered ASK */
    enum ss_origin origin;
    const uint8_t *memory; /* fetch: address of the body in this process. For a piece of a server: where the body is
                              left if the piece ends with SS_OK; NULL: it is not kept */
    uint32_t layer;        /* fetch with 'progress': the layer, or chunk, that 'progress' counts it for */
    enum ss_result result; /* out */
    char error[256];       /* out, for SS_REFUSED and SS_REDIRECTED: the server's text, truncated, zero-terminated */
};

/* Where registered memory is. */
enum ss_memory_kind {
    SS_MEMORY_LOCAL = 0,    /* in this process */
    SS_MEMORY_EXPORTED = 1, /* in another process, often of another machine, exported by ss_export_open() */
    SS_MEMORY_CUDA_IPC = 2  /* in a GPU of this machine, with a handle of cuIpcGetMemHandle() */
};

/* Description of memory to register. The call copies it. */
struct ss_memory {
    enum ss_memory_kind kind;
    uint8_t *address;       /* local: here; exported: in the exporting process, never dereferenced; CUDA IPC: NULL */
    uint64_t size;          /* bytes */
    const void *descriptor; /* exported: from ss_export_descriptor(); CUDA IPC: the CUipcMemHandle; local: NULL */
    size_t descriptor_size; /* bytes */
    const char *device;     /* CUDA IPC: the GPU's PCI address; else NULL */
};

struct ss_pipeline;
struct ss_registered_memory;
struct ss_tls;
struct ss_tls_session;

/*
 * One group of a batch: the elements of all its pieces, and the memory that they are delivered to or stored from. Its
 * chunks are a prefix chain: a chunk is useful only if all earlier chunks are complete, with all requested layers.
 */
struct ss_group {
    enum ss_quantizer quantizer;
    enum ss_dtype dtype;
    uint32_t scale_vectors; /* binned: number of vectors of a slice that share a scale; the last scale may have fewer */
    uint32_t vector_length; /* elements */
    uint8_t *memory;        /* first byte; where registered, within ss_memory_address() and its size */
    uint64_t memory_size;   /* bytes */
    struct ss_registered_memory *registered; /* the registration of 'memory'; NULL: plain memory, for a CPU only */
};

/*
 * All pieces of a batch in one request, KV.LAYERS, which our storage server answers layer after layer: 'layers' times
 * the same 'keys' chunks of one group, one layer of each, in the order of the batch's pieces.
 */
struct ss_layers {
    const uint8_t *request; /* as it goes over the wire */
    uint64_t request_size;  /* bytes */
    uint32_t layers;
    uint32_t keys;    /* at most 8192 */
    uint32_t refused; /* out: the server answered an error, and the pieces were fetched by GETRANGE instead */
    char error[256];  /* out: its text, truncated, zero-terminated */
};

/*
 * One batch: pieces of some groups, at most 16384 pieces and 64 groups. A fetch moves each piece from its source (a
 * server, a node of a cluster, memory) to its group's memory; a store reads the group's memory. Pieces are requested in
 * the order of the list: chunk by chunk, or layer by layer. Set the fields that are not marked 'out', and the others to
 * zero, and change nothing until the call that runs the batch returns. The core does not check that slices do not
 * overlap in the group's memory.
 */
struct ss_batch {
    struct ss_piece *pieces;
    struct ss_slice *slices;
    struct ss_group *groups;
    uint32_t piece_count;
    uint32_t slice_count;
    uint32_t group_count;
    uint32_t cancelled;                     /* set by ss_batch_cancel(); 0 at first */
    uint64_t deadline_ns;                   /* CLOCK_MONOTONIC */
    uint64_t received_bytes;                /* out: over the wire */
    uint64_t delivered_bytes;               /* out: into the groups' memory */
    uint32_t sockets_in_sync;               /* out: no socket holds half an answer, so all can be used again */
    uint32_t node_count;                    /* fetch: number of nodes that the sockets lead to; 0: one */
    struct ss_tls_session *const *sessions; /* fetch: TLS session of each socket, NULL for none; NULL: no TLS */
    uint32_t *progress;       /* fetch: word that receives the number of leading layers in place; NULL: none */
    uint32_t layers_first;    /* with 'progress': layers that were in place before the batch */
    uint32_t layers_end;      /* with 'progress': layers in place after it, at most 4096 more: the batch has all missing
                                 pieces of the layers from 'layers_first' on */
    uint64_t rate;            /* fetch: most delivered bytes per second; 0: no limit */
    struct ss_layers *layers; /* of a fetch over one socket, how all pieces are asked for, of
                                 a server that may know it; NULL: each by GETRANGE */
};

enum ss_stage {
    SS_STAGE_NET = 0,
    SS_STAGE_DECOMPRESS = 1,
    SS_STAGE_DEQUANTIZE = 2,
    SS_STAGE_DMA = 3,
    SS_STAGE_QUANTIZE = 4,
    SS_STAGE_COMPRESS = 5,
    SS_STAGE_PUT = 6,
    SS_STAGE_COUNT = 7
};

struct ss_stage_statistics {
    uint64_t items;
    uint64_t input_bytes;
    uint64_t output_bytes;
    uint64_t busy_ns; /* CPU time of all threads of the stage; waiting does not count */
};

/* Core lists hold one entry for each thread; -1 leaves that thread unpinned. */
struct ss_pipeline_options {
    size_t options_size;           /* sizeof(struct ss_pipeline_options), so that it can grow */
    const char *backend;           /* "software" or "doca" */
    const char *device;            /* PCI address or name of the backend's device; "" or NULL: the first that can */
    uint32_t fused;                /* decompress, dequantize and deliver a slice in one go, on the decompress threads */
    uint32_t queue_depth;          /* slices in each queue between stages */
    uint32_t requests_in_flight;   /* range requests sent ahead on each connection */
    uint32_t pin_memory;           /* lock the buffers in memory; failure to lock is not an error, see _statistics */
    uint64_t decompression_bytes;  /* size of the decompression buffer */
    uint64_t dequantization_bytes; /* of the dequantization buffer; 0 when fused */
    uint64_t dma_source_bytes;     /* of the DMA source buffer: what a batch delivers; 0 when fused */
    uint64_t store_bytes;          /* of the buffer that stored bodies are encoded into */
    const int32_t *net_cores;
    const int32_t *decompress_cores;
    const int32_t *dequantize_cores; /* unused when fused */
    const int32_t *dma_cores;        /* unused when fused */
    const int32_t *store_cores;
    uint32_t net_threads; /* also the number of connections that a batch uses to each node */
    uint32_t decompress_threads;
    uint32_t dequantize_threads;
    uint32_t dma_threads;
    uint32_t store_threads;
    uint32_t trace_events;     /* room for so many in each thread's log, 56 bytes each; 0: no tracing */
    uint32_t poll_interval_us; /* between two looks at a device that has nothing done; 0: no pause. At most 1 s */
    uint32_t nodes_max;        /* of a cluster that one batch may ask, at most 256; 0: one */
    /*
     * How long a device may owe results and give none before it is given up; 0: ten seconds. Only time in which the
     * thread that waits runs is counted, so that a machine that stood still is not taken for such a device. See
     * ss_pipeline_given_up().
     */
    uint32_t device_timeout_ms;
};

/* ---- Backends ------------------------------------------------------------------------------------------------ */

/*
 * ss_backend_description() says what backend 'name' is here, such as "CPU", "DOCA 2.9.1" or "DOCA emulator 3.0.0", in a
 * static string; NULL where this build has no such backend.
 */
SS_API const char *ss_backend_description(const char *name);

/* ss_backend_emulated() returns whether that backend only imitates its hardware. */
SS_API int ss_backend_emulated(const char *name);

/*
 * ss_device_error() writes the last thing that a device's library refused in this process, such as
 * "doca_mmap_start: DOCA_ERROR_DRIVER", cut to 'size' - 1 bytes; "" before there was one. It says why a call ended with
 * SS_NOT_SUPPORTED, SS_BAD_ARGUMENT, SS_NO_MEMORY or SS_DEVICE. From any thread.
 */
SS_API void ss_device_error(char *text, size_t size);

/* ---- Life of a pipeline -------------------------------------------------------------------------------------- */

/*
 * ss_pipeline_create() allocates, touches and locks all buffers and starts and pins all threads; nothing is allocated
 * afterwards. Fails with SS_BAD_ARGUMENT, SS_NOT_SUPPORTED (unknown backend, no device
 * that can do its work, or options that the backend does not take), SS_NO_MEMORY, SS_OS_ERROR (errno), SS_DEVICE.
 */
SS_API enum ss_result ss_pipeline_create(const struct ss_pipeline_options *options, struct ss_pipeline **pipeline);

/*
 * ss_pipeline_destroy() stops the threads and frees the buffers. No call may be in progress. NULL is allowed. One whose
 * device was given up keeps all that the device may still use, until the process ends.
 */
SS_API void ss_pipeline_destroy(struct ss_pipeline *pipeline);

/* ss_pipeline_device() returns the name of the device that was opened, "" where the backend has none. */
SS_API const char *ss_pipeline_device(const struct ss_pipeline *pipeline);

/*
 * ss_pipeline_given_up() returns 1 once a device did not finish its work in 'device_timeout_ms'. The pipeline never
 * uses that device again: its work and all later work fail with SS_DEVICE. Such a device may still read and write the
 * memory of the failed batches, and this pipeline's buffers, until the process ends: do not report them as quiet
 * before. From any thread.
 */
SS_API int ss_pipeline_given_up(const struct ss_pipeline *pipeline);

/* ss_pipeline_memory_kinds() returns a mask with bit 1 << kind for each kind that ss_memory_register() takes. */
SS_API uint32_t ss_pipeline_memory_kinds(const struct ss_pipeline *pipeline);

/* ss_pipeline_locked_bytes() returns how many bytes of the buffers could be locked in memory. */
SS_API uint64_t ss_pipeline_locked_bytes(const struct ss_pipeline *pipeline);

/*
 * ss_memory_register() registers memory with the pipeline's backend, once for any number of batches. A device reaches
 * no other memory. The memory, and its export if it has one, must exist until ss_memory_release(). Fails with
 * SS_NOT_SUPPORTED (this backend does not take this kind), SS_BAD_ARGUMENT (invalid descriptor), SS_NO_MEMORY,
 * SS_DEVICE. From any thread, also during batches.
 */
SS_API enum ss_result ss_memory_register(struct ss_pipeline *pipeline, const struct ss_memory *memory,
                                         struct ss_registered_memory **registered);

/*
 * ss_memory_release() ends the registration. No batch may use it, and the pipeline must still exist. If its device was
 * given up, the device keeps its access, so the memory must then exist until the process ends.
 */
SS_API void ss_memory_release(struct ss_registered_memory *registered);

/* ss_memory_address() returns the first address of the memory, as groups name it. */
SS_API uint8_t *ss_memory_address(const struct ss_registered_memory *registered);

/*
 * ss_pipeline_fetch() runs one batch over 'socket_count' connected, authenticated, non-blocking sockets. It requests an
 * equal share of every piece's slices on each socket with GETRANGE, receives them into the decompression buffer, and
 * passes each slice on as soon as it is complete: checksum, decompress, dequantize, deliver.
 *
 * A piece in memory: a backend that can read any memory decodes it in place, and it needs no region in the
 * decompression buffer; else it is copied there. It must not change until the call returns. A batch of such pieces
 * alone needs no sockets. An awaited piece delays only itself and the end of the batch. A server's piece with 'memory'
 * is received there, or copied there when it is in place; the memory is undefined unless the piece is SS_OK.
 *
 * Several nodes: the sockets are in node order, the same number for each, at most 'net_threads'. A piece is requested
 * on the sockets of its node. If the node answers MOVED or ASK, the piece is SS_REDIRECTED and its 'error' has the
 * answer; this does not fail other pieces.
 *
 * Failure: pieces of the same group and of the same or a later chunk become SS_SKIPPED, unless they are in place. All
 * other pieces continue. A broken connection fails the pieces that are outstanding on it.
 *
 * The call blocks until the batch is quiet: afterwards nothing reads or writes the groups' memory or the batch, except
 * a device that was given up (ss_pipeline_given_up()). It returns shortly after 'deadline_ns' at the latest, earlier
 * when cancelled; if a device has work, when the device has finished it or is given up. Every piece has its own
 * 'result'. Returns SS_OK if all pieces are SS_OK, else the result of the first failed piece in the list; errno for
 * SS_OS_ERROR.
 *
 * 'sockets_in_sync' tells whether the sockets can be used again. They can after well-formed answers (SS_OK, and usually
 * SS_NOT_FOUND, SS_REFUSED, SS_CHECKSUM and SS_BAD_DATA): the outstanding answers were then read and dropped. Otherwise
 * close the sockets. A socket with half an answer left is already disconnected, so it cannot be taken for a new answer.
 *
 * SS_BAD_ARGUMENT, before any byte moves, if numbers of the batch do not fit each other or the buffers, or if a fetch
 * is running: one at a time for each pipeline. ss_pipeline_encode() may run at the same time.
 */
SS_API enum ss_result ss_pipeline_fetch(struct ss_pipeline *pipeline, struct ss_batch *batch, const int32_t *sockets,
                                        uint32_t socket_count);

/* ss_batch_cancel() makes the batch that is running end soon with SS_CANCELLED. From any thread. */
SS_API void ss_batch_cancel(struct ss_batch *batch);

/*
 * ss_batch_supply() gives the address of an awaited piece's body, which must not change until the call that runs the
 * batch returns; NULL fails the piece with SS_NOT_FOUND. Once for each piece, before or during the batch. From any
 * thread.
 */
SS_API void ss_batch_supply(struct ss_batch *batch, uint32_t piece, const uint8_t *memory);

/*
 * ss_pipeline_copy_body() copies the body of a piece that ss_pipeline_encode() has made to 'target', which has room for
 * its body_length. SS_BAD_ARGUMENT where the piece is none of those in the store buffer.
 */
SS_API enum ss_result ss_pipeline_copy_body(const struct ss_pipeline *pipeline, const struct ss_piece *piece,
                                            uint8_t *target);

/*
 * ss_progress_wait() waits until the word differs from 'seen', at most 'timeout_ns', and returns the word. All that the
 * word counts can then be read, in any process that maps the memory.
 */
SS_API uint32_t ss_progress_wait(const uint32_t *progress, uint32_t seen, uint64_t timeout_ns);

/* ss_progress_tell() sets such a word and wakes its waiters, for layers that were placed without a batch. */
SS_API void ss_progress_tell(uint32_t *progress, uint32_t layers);

/*
 * ss_pipeline_encode() quantizes and compresses the pieces of a batch from their groups' memory into the store buffer.
 * Each piece becomes the body of a record. It runs on the store threads at low priority, and a running fetch goes
 * first. The backend first copies slices of memory that is not local. For each slice the caller sets
 * memory_offset, decoded_length, scales_length, vectors and bins; the call sets offset, encoded_length, checksum
 * and decoded_crc32. For each piece the caller sets group, codec, slices and decompression_offset, which here is the
 * offset in the store buffer of a region for the compress bound of all slices; the call sets body_length and result.
 *
 * Blocks until quiet. One call at a time (a second one is SS_BAD_ARGUMENT). After the first piece that failed, later
 * ones may be SS_SKIPPED; returns the first failed piece's result. 'deadline_ns' and ss_batch_cancel() apply. Fails
 * with SS_NOT_FINITE as ss_quantize() does.
 */
SS_API enum ss_result ss_pipeline_encode(struct ss_pipeline *pipeline, struct ss_batch *batch);

/* ---- TLS to storage ------------------------------------------------------------------------------------------ */

/* ss_tls_library() returns the library that does it and its version, NULL where this build has none. */
SS_API const char *ss_tls_library(void);

/*
 * ss_tls_create() reads whom to trust and, unless both are NULL, what certificate to show: files, PEM. SS_BAD_DATA
 * where one cannot be used, SS_NOT_SUPPORTED where this build has no TLS; 'error', cut to 'error_size' - 1 bytes, says
 * more.
 */
SS_API enum ss_result ss_tls_create(const char *authorities, const char *certificate, const char *key,
                                    struct ss_tls **tls, char *error, size_t error_size);

/* ss_tls_destroy() may come before the sessions' end. NULL is allowed. */
SS_API void ss_tls_destroy(struct ss_tls *tls);

/*
 * ss_tls_session_create() begins a session on a connected, non-blocking socket, which stays the caller's and must stay
 * open until ss_tls_session_destroy(). The server's certificate must hold 'name', a host name or an IP address. One
 * thread at a time uses a session, and no other bytes go over its socket.
 */
SS_API enum ss_result ss_tls_session_create(struct ss_tls *tls, int32_t socket, const char *name,
                                            struct ss_tls_session **session);
SS_API void ss_tls_session_destroy(struct ss_tls_session *session);

/*
 * These three never block. SS_OK with '*events' 0 is done; with POLLIN or POLLOUT call again, with the same arguments,
 * once the socket is ready for that. Otherwise the session is over: SS_DISCONNECTED, or SS_PROTOCOL where the other
 * side does not speak TLS, is not to be trusted, or its bytes were changed on the way; ss_tls_reason() says more.
 */
SS_API enum ss_result ss_tls_handshake(struct ss_tls_session *session, uint32_t *events);
SS_API enum ss_result ss_tls_send(struct ss_tls_session *session, const void *data, size_t size, size_t *sent,
                                  uint32_t *events);
SS_API enum ss_result ss_tls_receive(struct ss_tls_session *session, void *data, size_t size, size_t *received,
                                     uint32_t *events);
SS_API const char *ss_tls_reason(const struct ss_tls_session *session);

/* ss_tls_has_pending() returns whether bytes have arrived that nobody has read. */
SS_API int ss_tls_has_pending(const struct ss_tls_session *session);

/*
 * ss_pipeline_put() sends SET key head+body for one encoded piece on one connected, non-blocking socket and waits for
 * the answer until 'deadline_ns'. The key is sent as it is. SS_REFUSED when the server answers an error; its text,
 * cut to 'error_size' - 1 bytes, is then in 'error'. After any other failure close the socket. A server may refuse
 * before it has read the value: then, too, the answer is SS_REFUSED, but the socket is disconnected. Runs on the
 * caller's thread; calls for different sockets may run at the same time. 'session': on the socket; NULL: no TLS.
 */
SS_API enum ss_result ss_pipeline_put(struct ss_pipeline *pipeline, const struct ss_piece *piece, const void *head,
                                      size_t head_size, int32_t socket, struct ss_tls_session *session,
                                      uint64_t deadline_ns, char *error, size_t error_size);

/* ss_pipeline_statistics() copies the counters since creation into statistics[SS_STAGE_COUNT]. From any thread. */
SS_API void ss_pipeline_statistics(const struct ss_pipeline *pipeline, struct ss_stage_statistics *statistics);

/*
 * A span of one stage thread's time in a fetch batch: a slice in a stage, or in SS_STAGE_NET what one system call
 * received. Spans of one thread and stage are in the order of their ends, and either nest or do not overlap: slices
 * that are decompressed in turns share their end, and what a device has queued begins when the work before it ends.
 * Fused, a slice's SS_STAGE_DEQUANTIZE span, which delivers it, is the decompress thread's, too.
 */
struct ss_trace_event {
    uint64_t begin_ns; /* CLOCK_MONOTONIC */
    uint64_t end_ns;
    uint64_t input_bytes;
    uint64_t output_bytes;
    uint32_t batch;  /* of the pipeline, counted from 1 */
    uint32_t piece;  /* index in the batch */
    uint32_t slice;  /* likewise; UINT32_MAX for SS_STAGE_NET */
    int32_t core;    /* where the span ended */
    uint32_t stage;  /* enum ss_stage */
    uint32_t thread; /* of those that serve the stage */
};

/*
 * ss_pipeline_trace_start() begins a recording, and ends the one before it. ss_pipeline_trace_stop() ends it; threads
 * may add an event that they are at. Each log keeps its first 'trace_events' events. From any thread.
 * SS_NOT_SUPPORTED where the pipeline was made without room for events.
 */
SS_API enum ss_result ss_pipeline_trace_start(struct ss_pipeline *pipeline);
SS_API void ss_pipeline_trace_stop(struct ss_pipeline *pipeline);

/*
 * ss_pipeline_trace_read() copies the last recording's events, at most 'count_max', one thread's after another's, and
 * returns how many there are; in '*dropped' how many found their log full. During a recording it sees what is there so
 * far. Not beside ss_pipeline_trace_start().
 */
SS_API uint64_t ss_pipeline_trace_read(struct ss_pipeline *pipeline, struct ss_trace_event *events, uint64_t count_max,
                                       uint64_t *dropped);

/* ---- Memory that others may take away ------------------------------------------------------------------------- */

struct ss_guard;

/*
 * ss_guard_open() makes this process survive that the file behind a mapping shrinks, or that its file system is full:
 * a thread that touches what is gone then finds zeros, in memory that is nobody else's, all over the mapping, which is
 * lost. 'address' is where the mapping begins, at a page; it stays mapped until ss_guard_close(). A call installs a
 * handler of SIGBUS where another one, or none, is installed; it passes on what is not about guarded memory. A thread
 * that blocks the signal survives nothing. SS_BAD_ARGUMENT, SS_NO_MEMORY, SS_OS_ERROR (errno). From any thread.
 */
SS_API enum ss_result ss_guard_open(void *address, uint64_t size, struct ss_guard **guard);

/* ss_guard_lost() returns whether that has happened: ask after the last access, and trust nothing read where it has. */
SS_API int ss_guard_lost(const struct ss_guard *guard);

/* ss_guard_close() ends it; nobody may be touching the memory. NULL is allowed. */
SS_API void ss_guard_close(struct ss_guard *guard);

/* ---- Memory in another order ----------------------------------------------------------------------------------- */

/*
 * ss_copy_strided() copies 'count' blocks of one shape, each from where 'from' says to where 'to' says. A block has up
 * to six dimensions of 'sizes' elements, of 1, 2, 4 or 8 bytes; strides are bytes from one element to the next of a
 * dimension. No two elements of a target may overlap, nor targets with sources. SS_BAD_ARGUMENT for other dimensions or
 * elements. Thread-safe.
 */
SS_API enum ss_result ss_copy_strided(void *const *to, const void *const *from, uint64_t count, uint32_t dimensions,
                                      const uint64_t *sizes, const int64_t *to_strides, const int64_t *from_strides,
                                      uint32_t element_bytes);

/* ---- Memory for other machines' pipelines --------------------------------------------------------------------- */

struct ss_export;

/*
 * ss_export_open() lets a DPU read and write 'size' bytes at 'address', and describes them for a pipeline there:
 * SS_MEMORY_EXPORTED. 'device' is the PCI address or name of one of the DPU's functions on this side; "" or NULL: the
 * first that can. 'dmabuf_fd' is -1 for host memory, or for GPU memory with nvidia-peermem; else the DMA-BUF that
 * holds the GPU memory at 'address'. Memory, descriptor of the DMA-BUF and export must stay while anyone uses them.
 * Fails with SS_NOT_SUPPORTED (no such device, or it cannot), SS_BAD_ARGUMENT, SS_NO_MEMORY, SS_DEVICE.
 */
SS_API enum ss_result ss_export_open(const char *device, void *address, uint64_t size, int32_t dmabuf_fd,
                                     struct ss_export **exported);

/* ss_export_descriptor() gives the description. Whoever has it can reach the memory: for trusted connections only. */
SS_API void ss_export_descriptor(const struct ss_export *exported, const void **bytes, size_t *size);

/* ss_export_close() ends it; importers' transfers fail from then on. NULL is allowed. */
SS_API void ss_export_close(struct ss_export *exported);
/* cffi:end */

#endif /* SHADOWSERVE_H */
