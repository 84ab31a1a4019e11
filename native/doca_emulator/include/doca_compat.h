/* SPDX-License-Identifier: Apache-2.0 */
/*
 * doca_compat.h - how the calls of the emulated DOCA are declared
 *
 * These headers declare the part of NVIDIA's DOCA that our backend uses, written from what its documentation says. They
 * hold none of NVIDIA's text. Where the SDK is installed, its own headers are used in their place.
 */
#ifndef DOCA_COMPAT_H_
#define DOCA_COMPAT_H_

/* As with the SDK, a call that may still change warns unless DOCA_ALLOW_EXPERIMENTAL_API is defined. */
#ifdef DOCA_ALLOW_EXPERIMENTAL_API
#define DOCA_EXPERIMENTAL __attribute__((visibility("default")))
#else
#define DOCA_EXPERIMENTAL                                                                                              \
    __attribute__((visibility("default"), deprecated("experimental: define DOCA_ALLOW_EXPERIMENTAL_API to use it")))
#endif
#define DOCA_STABLE __attribute__((visibility("default")))

#endif /* DOCA_COMPAT_H_ */
