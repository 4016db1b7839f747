/* Makes files below one directory fail, or slow, for a process that preloads this: see disk.py.

   CLUSTER_DISK_CONTROL names a file that all processes map, CLUSTER_DISK_BELOW the directory. What
   the control says applies at once; what happened is counted there, errors of the disk itself too.
*/
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

struct control {
    uint64_t failing;    /* which kinds of calls fail with EIO: bits of enum kind */
    uint64_t percent;    /* how many of them */
    uint64_t delay_usec; /* of every call */
    uint64_t failed, delayed, no_space, read_only, other; /* counts */
};
enum kind { READS = 1, WRITES = 2, SYNCS = 4, NAMES = 8 };

static struct control *control;
static const char *below;

__attribute__((constructor)) static void begin(void)
{
    const char *path = getenv("CLUSTER_DISK_CONTROL");
    below = getenv("CLUSTER_DISK_BELOW");
    if (path == NULL || below == NULL)
        return;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return;
    void *mapped = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (mapped != MAP_FAILED)
        control = mapped;
}

static int is_below(const char *path)
{
    size_t length = strlen(below);
    return strncmp(path, below, length) == 0 && (path[length] == '/' || path[length] == 0);
}

static int fd_is_below(int fd)
{
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0)
        return 0;
    path[length] = 0;
    return is_below(path);
}

static void count(uint64_t *counter) { __atomic_add_fetch(counter, 1, __ATOMIC_RELAXED); }

/* Whether this call has to fail. Waits first, as a slow disk does. */
static int strikes(enum kind kind)
{
    static __thread unsigned seed;
    if (control->delay_usec) {
        struct timespec left = {control->delay_usec / 1000000,
                                control->delay_usec % 1000000 * 1000};
        count(&control->delayed);
        while (nanosleep(&left, &left) != 0 && errno == EINTR)
            ;
    }
    if (!(control->failing & kind))
        return 0;
    if (seed == 0)
        seed = (unsigned)getpid() ^ (unsigned)(uintptr_t)&seed;
    if ((uint64_t)(rand_r(&seed) % 100) >= control->percent)
        return 0;
    count(&control->failed);
    errno = EIO;
    return 1;
}

static void note(void)
{
    if (errno == ENOSPC)
        count(&control->no_space);
    else if (errno == EROFS)
        count(&control->read_only);
    else if (errno == EIO)
        count(&control->other);
}

/* A call on a file descriptor, or on a path: `condition` says whether it is one of ours. */
#define CALL(type, name, parameters, arguments, condition, kind)                                   \
    type name parameters                                                                           \
    {                                                                                              \
        static type(*real) parameters;                                                             \
        if (real == NULL)                                                                          \
            real = (type(*) parameters)dlsym(RTLD_NEXT, #name);                                    \
        if (control == NULL || !(condition))                                                       \
            return real arguments;                                                                 \
        if (strikes(kind))                                                                         \
            return -1;                                                                             \
        type result = real arguments;                                                              \
        if (result < 0)                                                                            \
            note();                                                                                \
        return result;                                                                             \
    }

#define OF_FD(name, type, parameters, arguments, kind)                                             \
    CALL(type, name, parameters, arguments, fd_is_below(fd), kind)
#define OF_PATH(name, parameters, arguments)                                                       \
    CALL(int, name, parameters, arguments, is_below(path), NAMES)

OF_FD(write, ssize_t, (int fd, const void *data, size_t size), (fd, data, size), WRITES)
OF_FD(pwrite, ssize_t, (int fd, const void *data, size_t size, off_t at), (fd, data, size, at), WRITES)
OF_FD(pwrite64, ssize_t, (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at), WRITES)
OF_FD(writev, ssize_t, (int fd, const struct iovec *parts, int n), (fd, parts, n), WRITES)
OF_FD(pwritev, ssize_t, (int fd, const struct iovec *parts, int n, off_t at), (fd, parts, n, at), WRITES)
OF_FD(pwritev64, ssize_t, (int fd, const struct iovec *parts, int n, off64_t at), (fd, parts, n, at), WRITES)
OF_FD(ftruncate, int, (int fd, off_t size), (fd, size), WRITES)
OF_FD(ftruncate64, int, (int fd, off64_t size), (fd, size), WRITES)
OF_FD(fallocate, int, (int fd, int mode, off_t at, off_t size), (fd, mode, at, size), WRITES)
OF_FD(fallocate64, int, (int fd, int mode, off64_t at, off64_t size), (fd, mode, at, size), WRITES)
OF_FD(fsync, int, (int fd), (fd), SYNCS)
OF_FD(fdatasync, int, (int fd), (fd), SYNCS)
OF_FD(read, ssize_t, (int fd, void *data, size_t size), (fd, data, size), READS)
OF_FD(pread, ssize_t, (int fd, void *data, size_t size, off_t at), (fd, data, size, at), READS)
OF_FD(pread64, ssize_t, (int fd, void *data, size_t size, off64_t at), (fd, data, size, at), READS)
OF_FD(preadv, ssize_t, (int fd, const struct iovec *parts, int n, off_t at), (fd, parts, n, at), READS)
OF_FD(preadv64, ssize_t, (int fd, const struct iovec *parts, int n, off64_t at), (fd, parts, n, at), READS)
/* What Python calls for os.pwritev and os.preadv; the names with 64 are those of large offsets. */
OF_FD(pwritev2, ssize_t, (int fd, const struct iovec *parts, int n, off_t at, int flags), (fd, parts, n, at, flags), WRITES)
OF_FD(pwritev64v2, ssize_t, (int fd, const struct iovec *parts, int n, off64_t at, int flags), (fd, parts, n, at, flags), WRITES)
OF_FD(preadv2, ssize_t, (int fd, const struct iovec *parts, int n, off_t at, int flags), (fd, parts, n, at, flags), READS)
OF_FD(preadv64v2, ssize_t, (int fd, const struct iovec *parts, int n, off64_t at, int flags), (fd, parts, n, at, flags), READS)
OF_PATH(rename, (const char *path, const char *new), (path, new))
OF_PATH(link, (const char *path, const char *new), (path, new))
OF_PATH(unlink, (const char *path), (path))
OF_PATH(mkdir, (const char *path, mode_t mode), (path, mode))
CALL(int, renameat2, (int from, const char *path, int to, const char *new, unsigned flags),
     (from, path, to, new, flags), is_below(path), NAMES)

/* Opening is of one kind or the other by its flags. */
#define OPENING(name, front, passed)                                                               \
    int name(front const char *path, int flags, ...)                                               \
    {                                                                                              \
        va_list rest;                                                                              \
        va_start(rest, flags);                                                                     \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;                    \
        va_end(rest);                                                                              \
        static int (*real)(front const char *, int, ...);                                          \
        if (real == NULL)                                                                          \
            real = (int (*)(front const char *, int, ...))dlsym(RTLD_NEXT, #name);                 \
        if (control == NULL || !is_below(path))                                                    \
            return real(passed path, flags, mode);                                                 \
        if (strikes(flags & (O_WRONLY | O_RDWR) ? NAMES : READS))                                  \
            return -1;                                                                             \
        int result = real(passed path, flags, mode);                                               \
        if (result < 0)                                                                            \
            note();                                                                                \
        return result;                                                                             \
    }
#define DIRECTORY int directory,
#define PASSED directory,
OPENING(open, , )
OPENING(open64, , )
OPENING(openat, DIRECTORY, PASSED)
OPENING(openat64, DIRECTORY, PASSED)
