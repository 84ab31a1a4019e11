/* SPDX-License-Identifier: Apache-2.0 */
/*
 * device.c - files and devices: opened exclusively, without the page cache, with all blocks reserved
 *
 * Two servers on one device would destroy each other's data. So a device is opened with O_EXCL, which fails while it is
 * mounted, part of a volume, or opened with O_EXCL by another process. Files and devices are also locked with flock().
 * A file's blocks are reserved when it is opened, so that a later write does not fail for lack of space.
 */
#include "block/block.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#define PATH_SIZE 512u

/* "digits 'n' digits" and no more, as in nvme0n1, whose partitions have another suffix. */
static int is_namespace(const char *name) {
    if (!isdigit((unsigned char)*name)) {
        return 0;
    }
    name += strspn(name, "0123456789");
    if (*name++ != 'n' || !isdigit((unsigned char)*name)) {
        return 0;
    }
    return name[strspn(name, "0123456789")] == '\0';
}

int ss_block_nvme_paths(const char *path, char *block_path, char *character_path, size_t size) {
    char real[PATH_MAX];

    /* Such as /dev/disk/by-id/nvme-..., which is a link. */
    if (realpath(path, real) == NULL) {
        return 0;
    }
    char *name = strrchr(real, '/') + 1;
    const char *number = name;
    if (strncmp(name, "nvme", 4) == 0) {
        number += 4;
    } else if (strncmp(name, "ng", 2) == 0) {
        number += 2;
    } else {
        return 0;
    }
    if (!is_namespace(number)) {
        return 0;
    }
    int folder = (int)(name - real);
    snprintf(block_path, size, "%.*snvme%s", folder, real, number);
    snprintf(character_path, size, "%.*sng%s", folder, real, number);
    return 1;
}

/* Unlocks first, since another process may have the same open file, such as a child of fork(). */
static void close_unlocked(int fd) {
    if (fd >= 0) {
        (void)flock(fd, LOCK_UN);
        close(fd);
    }
}

void ss_block_device_close(struct ss_block_device *device) {
    close_unlocked(device->fd);
    close_unlocked(device->guard);
    device->fd = device->guard = -1;
}

int ss_block_device_is_gone(const struct ss_block_device *device) {
    uint64_t size;

    if (device->is_file) {
        return 0;
    }
    return ioctl(device->guard >= 0 ? device->guard : device->fd, BLKGETSIZE64, &size) != 0 || size < device->size;
}

static enum ss_result lock(int fd) {
    if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
        errno = errno == EWOULDBLOCK ? EBUSY : errno;
        return SS_OS_ERROR;
    }
    return SS_OK;
}

/* Opens with O_DIRECT if the file system supports it. */
static enum ss_result open_direct(struct ss_block_device *device, const char *path, int flags) {
    device->fd = open(path, flags | O_DIRECT, 0600);
    if (device->fd < 0 && errno == EINVAL) {
        device->is_buffered = 1; /* the file system does not support O_DIRECT, but may have created the file */
        device->fd = open(path, flags & O_CREAT ? flags & ~O_EXCL : flags, 0600);
    }
    return device->fd < 0 ? SS_OS_ERROR : lock(device->fd);
}

static int sync_folder(const char *path) {
    char folder[PATH_MAX];
    const char *slash = strrchr(path, '/');

    snprintf(folder, sizeof folder, "%.*s", slash != NULL ? (int)(slash - path) + 1 : 1, slash != NULL ? path : ".");
    int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) {
        return -1;
    }
    int result = fsync(fd);
    int error = errno;
    close(fd);
    errno = error;
    /* Some file systems do not support this, and do not need it. */
    return result != 0 && error != EINVAL ? -1 : 0;
}

/* Reserves all blocks of the file, or uses the present size. */
static enum ss_result file_size(struct ss_block_device *device, uint64_t size) {
    struct stat status;

    if (size > INT64_MAX) {
        return SS_BAD_ARGUMENT;
    }
    if (fstat(device->fd, &status) != 0) {
        return SS_OS_ERROR;
    }
    device->size = size != 0 ? size : (uint64_t)status.st_size;
    int error;
    do {
        error = device->size == 0 ? 0 : posix_fallocate(device->fd, 0, (off_t)device->size);
    } while (error == EINTR);
    if (error != 0) { /* leave it as it was */
        (void)!ftruncate(device->fd, status.st_size);
        errno = error;
        return SS_OS_ERROR;
    }
    return fsync(device->fd) == 0 ? SS_OK : SS_OS_ERROR;
}

static enum ss_result file_open(struct ss_block_device *device, const struct ss_block_options *options, int exists) {
    int flags = O_RDWR | O_CLOEXEC | (exists ? 0 : O_CREAT | O_EXCL);
    enum ss_result result = open_direct(device, options->path, flags);

    device->is_file = 1;
    if (result == SS_OK) {
        result = file_size(device, options->size);
    }
    if (result == SS_OK && !exists && sync_folder(options->path) != 0) {
        result = SS_OS_ERROR;
    }
    if (result != SS_OK && !exists && device->fd >= 0) {
        int error = errno;
        (void)unlink(options->path); /* which this function created above */
        errno = error;
    }
    return result;
}

static enum ss_result device_size(struct ss_block_device *device, int fd, uint64_t size) {
    if (ioctl(fd, BLKGETSIZE64, &device->size) != 0) {
        return SS_OS_ERROR;
    }
    if (size > device->size) {
        errno = ENOSPC;
        return SS_OS_ERROR;
    }
    device->size = size != 0 ? size : device->size;
    return SS_OK;
}

static enum ss_result device_open(struct ss_block_device *device, const struct ss_block_options *options) {
    enum ss_result result = open_direct(device, options->path, O_RDWR | O_CLOEXEC | O_EXCL);
    int sector;

    if (result != SS_OK) {
        return result;
    }
    /* Those of more than a page would need larger requests than ours. */
    if (ioctl(device->fd, BLKSSZGET, &sector) != 0 || sector > (int)SS_BLOCK_ALIGNMENT) {
        return SS_NOT_SUPPORTED;
    }
    /* Drops cached pages of earlier buffered reads and writes. The kernel may refuse this without root. */
    (void)fsync(device->fd);
    (void)ioctl(device->fd, BLKFLSBUF, 0);
    return device_size(device, device->fd, options->size);
}

static enum ss_result nvme_open(struct ss_block_device *device, const struct ss_block_options *options) {
#ifdef SS_HAVE_URING
    char block_path[PATH_SIZE], character_path[PATH_SIZE];

    if (!ss_block_nvme_paths(options->path, block_path, character_path, PATH_SIZE)) {
        return SS_NOT_SUPPORTED;
    }
    device->guard = open(block_path, O_RDWR | O_CLOEXEC | O_EXCL);
    if (device->guard < 0) {
        return SS_OS_ERROR;
    }
    enum ss_result result = lock(device->guard);
    if (result != SS_OK) {
        return result;
    }
    (void)fsync(device->guard);
    (void)ioctl(device->guard, BLKFLSBUF, 0);
    device->fd = open(character_path, O_RDWR | O_CLOEXEC);
    if (device->fd < 0) {
        return SS_OS_ERROR;
    }
    result = ss_block_nvme_identify(device, block_path);
    return result == SS_OK ? device_size(device, device->guard, options->size) : result;
#else
    (void)device;
    (void)options;
    return SS_NOT_SUPPORTED;
#endif
}

enum ss_result ss_block_device_open(struct ss_block_device *device, const struct ss_block_options *options,
                                    enum ss_block_access access) {
    struct stat status;
    int exists = stat(options->path, &status) == 0;
    enum ss_result result;

    *device = (struct ss_block_device){.fd = -1, .guard = -1};
    if (!exists && (errno != ENOENT || options->size == 0)) {
        return SS_OS_ERROR;
    }
    if (access == SS_BLOCK_NVME) {
        result = exists ? nvme_open(device, options) : SS_NOT_SUPPORTED;
    } else if (exists && S_ISBLK(status.st_mode)) {
        result = device_open(device, options);
    } else if (!exists || S_ISREG(status.st_mode)) {
        result = file_open(device, options, exists);
    } else {
        result = SS_BAD_ARGUMENT;
    }
    device->size -= device->size % SS_BLOCK_ALIGNMENT;
    if (result == SS_OK && device->size == 0) {
        result = SS_BAD_ARGUMENT;
    }
    if (result != SS_OK) {
        int error = errno;
        ss_block_device_close(device);
        errno = error;
    }
    return result;
}
