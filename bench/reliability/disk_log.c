/* Records what a process asks of the file system below one folder, in the order in which it happens.

   gcc -shared -fPIC -O1 -o disk_log.so disk_log.c -ldl
   DISK_LOG=FILE DISK_ROOT=FOLDER LD_PRELOAD=disk_log.so COMMAND

   Each record is a head (struct record) and two texts. Calls take turns: a call and its record are
   one step, so that the log of several threads is an order that did happen. Several processes may
   append to one log. What would change a file unseen (a shared writable mapping, copy_file_range, a
   stdio stream) is recorded as UNSEEN, and the reader refuses the log: it would tell half of it.
   SQLite's -shm files are left out: they are mapped, and hold nothing that is to survive. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind { CREATE = 1, WRITE, TRUNCATE, SYNC, RENAME, UNLINK, MKDIR, RMDIR, LINK, MARK, UNSEEN };

struct record {
    uint32_t kind;
    uint32_t first_bytes;  /* of the first text: a path, or what was written */
    uint32_t second_bytes; /* of the second: a path */
    uint32_t spare;
    uint64_t node;  /* inode */
    int64_t offset; /* of a write; the size of a truncation */
};

static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;
static const char *root;
static size_t root_bytes;
static int log_fd = -1;

/* The function behind ours, found once. */
#define REAL(name) ({ static __typeof__(&name) real; if (!real) real = dlsym(RTLD_NEXT, #name); real; })

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("DISK_LOG");
    root = getenv("DISK_ROOT");
    if (!path || !root) return;
    root_bytes = strlen(root);
    log_fd = REAL(open64)(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
}

static int is_ours(const char *path) {
    size_t length = strlen(path);
    if (log_fd < 0 || strncmp(path, root, root_bytes) != 0) return 0;
    if (path[root_bytes] != '/' && path[root_bytes] != 0) return 0;
    return length < 4 || strcmp(path + length - 4, "-shm") != 0;
}

/* The path of an open file, if it is a file or folder of ours. */
static int path_of(int fd, char *path) {
    char link[64];
    struct stat64 info;
    if (log_fd < 0 || fd == log_fd || fstat64(fd, &info) != 0) return 0;
    if (!S_ISREG(info.st_mode) && !S_ISDIR(info.st_mode)) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    if (length < 0) return 0;
    path[length] = 0;
    size_t gone = strlen(" (deleted)");
    if ((size_t)length > gone && strcmp(path + length - gone, " (deleted)") == 0)
        path[length - gone] = 0;
    return is_ours(path);
}

/* An absolute path for a name that is relative to a folder. */
static int absolute(int folder, const char *name, char *path) {
    if (name[0] == '/') {
        snprintf(path, PATH_MAX, "%s", name);
    } else if (folder == AT_FDCWD) {
        char here[PATH_MAX];
        if (!getcwd(here, sizeof here)) return 0;
        if (snprintf(path, PATH_MAX, "%s/%s", here, name) >= PATH_MAX) return 0;
    } else {
        char above[PATH_MAX];
        if (!path_of(folder, above)) return 0;
        if (snprintf(path, PATH_MAX, "%s/%s", above, name) >= PATH_MAX) return 0;
    }
    return is_ours(path);
}

static uint64_t node_of(int fd) {
    struct stat64 info;
    return fstat64(fd, &info) == 0 ? info.st_ino : 0;
}

static uint64_t node_at(const char *path) {
    struct stat64 info;
    return lstat64(path, &info) == 0 ? info.st_ino : 0;
}

static void note(enum kind kind, uint64_t node, int64_t offset, const void *first, size_t first_bytes,
                 const char *second) {
    struct record head = {kind, first_bytes, second ? strlen(second) : 0, 0, node, offset};
    struct iovec parts[3] = {{&head, sizeof head},
                             {(void *)first, first_bytes},
                             {(void *)second, head.second_bytes}};
    size_t wanted = sizeof head + first_bytes + head.second_bytes;
    int kept = errno;
    if (REAL(writev)(log_fd, parts, 3) != (ssize_t)wanted) abort(); /* a log with a hole is none */
    errno = kept;
}

static void note_path(enum kind kind, uint64_t node, const char *path) {
    note(kind, node, 0, path, strlen(path), NULL);
}

static void unseen(const char *call, const char *path) {
    char words[PATH_MAX + 64];
    int length = snprintf(words, sizeof words, "%s of %s", call, path);
    note(UNSEEN, 0, 0, words, length, NULL);
}

/* ---- opening */

static int open_noted(int folder, const char *name, int flags, mode_t mode) {
    char path[PATH_MAX];
    if (!(flags & (O_CREAT | O_TRUNC)) || !absolute(folder, name, path))
        return REAL(openat64)(folder, name, flags, mode);
    pthread_mutex_lock(&turn);
    int was_there = node_at(path) != 0;
    int fd = REAL(openat64)(folder, name, flags, mode);
    if (fd >= 0 && !was_there) note_path(CREATE, node_of(fd), path);
    if (fd >= 0 && was_there && (flags & O_TRUNC)) note(TRUNCATE, node_of(fd), 0, NULL, 0, NULL);
    pthread_mutex_unlock(&turn);
    return fd;
}

static mode_t mode_in(int flags, va_list rest) {
    return (flags & (O_CREAT | O_TMPFILE)) ? va_arg(rest, mode_t) : 0;
}

#define OPENS(name)                                   \
    int name(const char *path, int flags, ...) {      \
        va_list rest;                                 \
        va_start(rest, flags);                        \
        mode_t mode = mode_in(flags, rest);           \
        va_end(rest);                                 \
        return open_noted(AT_FDCWD, path, flags, mode); \
    }
#define OPENS_AT(name)                                        \
    int name(int folder, const char *path, int flags, ...) {  \
        va_list rest;                                         \
        va_start(rest, flags);                                \
        mode_t mode = mode_in(flags, rest);                   \
        va_end(rest);                                         \
        return open_noted(folder, path, flags, mode);         \
    }
OPENS(open)
OPENS(open64)
OPENS_AT(openat)
OPENS_AT(openat64)

int creat(const char *path, mode_t mode) {
    return open_noted(AT_FDCWD, path, O_WRONLY | O_CREAT | O_TRUNC, mode);
}

#define STREAMS(name)                                            \
    FILE *name(const char *path, const char *how) {              \
        char whole[PATH_MAX];                                    \
        if (strpbrk(how, "wa+") && absolute(AT_FDCWD, path, whole)) \
            unseen(#name, whole);                                \
        return REAL(name)(path, how);                            \
    }
STREAMS(fopen)
STREAMS(fopen64)

/* ---- content */

static ssize_t write_noted(int fd, const struct iovec *parts, int count, int64_t at) {
    char path[PATH_MAX];
    if (!path_of(fd, path))
        return at < 0 ? REAL(writev)(fd, parts, count) : REAL(pwritev64)(fd, parts, count, at);
    pthread_mutex_lock(&turn);
    int64_t where = at;
    if (at < 0) {
        struct stat64 info;
        int appends = fcntl(fd, F_GETFL) & O_APPEND;
        where = appends && fstat64(fd, &info) == 0 ? info.st_size : lseek64(fd, 0, SEEK_CUR);
    }
    ssize_t done = at < 0 ? REAL(writev)(fd, parts, count) : REAL(pwritev64)(fd, parts, count, at);
    if (done > 0) {
        char *data = malloc(done);
        size_t have = 0;
        if (!data) abort();
        for (int i = 0; i < count && have < (size_t)done; i++) {
            size_t take = parts[i].iov_len < done - have ? parts[i].iov_len : done - have;
            memcpy(data + have, parts[i].iov_base, take);
            have += take;
        }
        note(WRITE, node_of(fd), where, data, done, NULL);
        free(data);
    }
    pthread_mutex_unlock(&turn);
    return done;
}

ssize_t write(int fd, const void *data, size_t size) {
    struct iovec part = {(void *)data, size};
    return write_noted(fd, &part, 1, -1);
}
ssize_t writev(int fd, const struct iovec *parts, int count) {
    return write_noted(fd, parts, count, -1);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    struct iovec part = {(void *)data, size};
    return write_noted(fd, &part, 1, at);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    struct iovec part = {(void *)data, size};
    return write_noted(fd, &part, 1, at);
}
ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t at) {
    return write_noted(fd, parts, count, at);
}
ssize_t pwritev64(int fd, const struct iovec *parts, int count, off64_t at) {
    return write_noted(fd, parts, count, at);
}

static int truncate_noted(int fd, int64_t size) {
    char path[PATH_MAX];
    if (!path_of(fd, path)) return REAL(ftruncate64)(fd, size);
    pthread_mutex_lock(&turn);
    int failed = REAL(ftruncate64)(fd, size);
    if (!failed) note(TRUNCATE, node_of(fd), size, NULL, 0, NULL);
    pthread_mutex_unlock(&turn);
    return failed;
}
int ftruncate(int fd, off_t size) { return truncate_noted(fd, size); }
int ftruncate64(int fd, off64_t size) { return truncate_noted(fd, size); }

#define SYNCS(name)                                                       \
    int name(int fd) {                                                    \
        char path[PATH_MAX];                                              \
        if (!path_of(fd, path)) return REAL(name)(fd);                    \
        pthread_mutex_lock(&turn);                                        \
        note(SYNC, node_of(fd), 0, NULL, 0, NULL); /* ours is the disk */ \
        pthread_mutex_unlock(&turn);                                      \
        return 0;                                                         \
    }
SYNCS(fsync)
SYNCS(fdatasync)

/* ---- names */

static int rename_noted(int from, const char *old, int to, const char *new, unsigned flags) {
    char before[PATH_MAX], after[PATH_MAX];
    int is_from = absolute(from, old, before), is_to = absolute(to, new, after);
    if (!is_from && !is_to) return REAL(renameat2)(from, old, to, new, flags);
    pthread_mutex_lock(&turn);
    int failed = REAL(renameat2)(from, old, to, new, flags);
    if (!failed && is_from && is_to && !flags)
        note(RENAME, node_at(after), 0, before, strlen(before), after);
    else if (!failed)
        unseen("rename across", before);
    pthread_mutex_unlock(&turn);
    return failed;
}
int rename(const char *old, const char *new) { return rename_noted(AT_FDCWD, old, AT_FDCWD, new, 0); }
int renameat(int from, const char *old, int to, const char *new) {
    return rename_noted(from, old, to, new, 0);
}
int renameat2(int from, const char *old, int to, const char *new, unsigned flags) {
    return rename_noted(from, old, to, new, flags);
}

static int unlink_noted(int folder, const char *name, int flags) {
    char path[PATH_MAX];
    if (!absolute(folder, name, path)) return REAL(unlinkat)(folder, name, flags);
    pthread_mutex_lock(&turn);
    uint64_t node = node_at(path);
    int failed = REAL(unlinkat)(folder, name, flags);
    if (!failed) note_path(flags & AT_REMOVEDIR ? RMDIR : UNLINK, node, path);
    pthread_mutex_unlock(&turn);
    return failed;
}
int unlink(const char *name) { return unlink_noted(AT_FDCWD, name, 0); }
int unlinkat(int folder, const char *name, int flags) { return unlink_noted(folder, name, flags); }
int rmdir(const char *name) { return unlink_noted(AT_FDCWD, name, AT_REMOVEDIR); }

static int mkdir_noted(int folder, const char *name, mode_t mode) {
    char path[PATH_MAX];
    if (!absolute(folder, name, path)) return REAL(mkdirat)(folder, name, mode);
    pthread_mutex_lock(&turn);
    int failed = REAL(mkdirat)(folder, name, mode);
    if (!failed) note_path(MKDIR, node_at(path), path);
    pthread_mutex_unlock(&turn);
    return failed;
}
int mkdir(const char *name, mode_t mode) { return mkdir_noted(AT_FDCWD, name, mode); }
int mkdirat(int folder, const char *name, mode_t mode) { return mkdir_noted(folder, name, mode); }

static int link_noted(int from, const char *old, int to, const char *new, int flags) {
    char before[PATH_MAX], after[PATH_MAX];
    int is_from = absolute(from, old, before), is_to = absolute(to, new, after);
    pthread_mutex_lock(&turn);
    int failed = REAL(linkat)(from, old, to, new, flags);
    if (!failed && is_from && is_to) note(LINK, node_at(after), 0, before, strlen(before), after);
    else if (!failed && is_to) unseen("link across", after);
    pthread_mutex_unlock(&turn);
    return failed;
}
int link(const char *old, const char *new) { return link_noted(AT_FDCWD, old, AT_FDCWD, new, 0); }
int linkat(int from, const char *old, int to, const char *new, int flags) {
    return link_noted(from, old, to, new, flags);
}

/* ---- what we cannot see */

#define MAPS(name, offset)                                                                \
    void *name(void *at, size_t size, int prot, int flags, int fd, offset from) {         \
        char path[PATH_MAX];                                                              \
        if ((prot & PROT_WRITE) && (flags & MAP_SHARED) && fd >= 0 && path_of(fd, path))  \
            unseen(#name, path);                                                          \
        return REAL(name)(at, size, prot, flags, fd, from);                               \
    }
MAPS(mmap, off_t)
MAPS(mmap64, off64_t)

ssize_t copy_file_range(int in, off64_t *in_at, int out, off64_t *out_at, size_t size, unsigned flags) {
    char path[PATH_MAX];
    if (path_of(out, path)) unseen("copy_file_range", path);
    return REAL(copy_file_range)(in, in_at, out, out_at, size, flags);
}

#define SENDS(name, offset)                                        \
    ssize_t name(int out, int in, offset *at, size_t size) {       \
        char path[PATH_MAX];                                       \
        if (path_of(out, path)) unseen(#name, path);               \
        return REAL(name)(out, in, at, size);                      \
    }
SENDS(sendfile, off_t)
SENDS(sendfile64, off64_t)

#define RESERVES(name, offset)                              \
    int name(int fd, offset at, offset size) {              \
        char path[PATH_MAX];                                \
        if (path_of(fd, path)) unseen(#name, path);         \
        return REAL(name)(fd, at, size);                    \
    }
RESERVES(posix_fallocate, off_t)
RESERVES(posix_fallocate64, off64_t)
