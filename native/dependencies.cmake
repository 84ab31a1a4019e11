# SPDX-License-Identifier: Apache-2.0
# Finds the libraries that the C core stands on. Sets SHADOWSERVE_LIBRARIES, SHADOWSERVE_DEFINITIONS,
# SHADOWSERVE_HAVE_LZ4, SHADOWSERVE_HAVE_ZSTD, SHADOWSERVE_HAVE_URING, SHADOWSERVE_HAVE_TLS, and either
# SHADOWSERVE_DOCA_EMULATED or the target shadowserve_doca_sdk.
# One Deflate decoder is required; LZ4, zstd, liburing and OpenSSL are not.
