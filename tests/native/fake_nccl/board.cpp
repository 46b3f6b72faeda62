#include "board.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <random>

using namespace bucketwheel;

namespace fake_nccl {
namespace {

constexpr size_t kPage = 4096;

// The file at its full size under a name that nobody opens, then under its own: who finds it finds it complete.
int make_file(const std::string& name, size_t size_bytes, int world) {
  const std::string unfinished = name + ".new";
  const int file = open(unfinished.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (file < 0) {
    return -1;
  }
  const bool is_complete = ftruncate(file, static_cast<off_t>(size_bytes)) == 0 &&
                           pwrite(file, &world, sizeof world, 0) == sizeof world &&
                           rename(unfinished.c_str(), name.c_str()) == 0;
  if (!is_complete) {
    unlink(unfinished.c_str());
    close(file);
    return -1;
  }
  return file;
}

}  // namespace

std::string Board::new_name() {
  static std::atomic<uint64_t> count{0};
  const char* const temporary = std::getenv("TMPDIR");
  const char* const folder = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : temporary != nullptr ? temporary : "/tmp";
  std::random_device random;
  char name[40];
  std::snprintf(name, sizeof name, "/fake_nccl-%d-%u-%08x", getpid(), static_cast<unsigned>(count++), random());
  const std::string path = std::string(folder) + name;
  return path.size() < 100 ? path : "";
}

Board::Board(void* data, size_t size_bytes, int rank, int world)
    : head_(static_cast<Head*>(data)),
      stages_(static_cast<std::byte*>(data) + (sizeof(Head) + kPage - 1) / kPage * kPage),
      size_bytes_(size_bytes),
      rank_(rank),
      world_(world) {}

Board::~Board() { munmap(head_, size_bytes_); }

std::shared_ptr<Board> Board::join(const std::string& name, int rank, int world,
                                   const std::function<bool()>& is_stopped, int* error) {
  const size_t head_bytes = (sizeof(Head) + kPage - 1) / kPage * kPage;
  const size_t size_bytes = head_bytes + static_cast<size_t>(world) * 2 * kStageBytes;
  int file = -1;
  if (rank == 0) {
    file = make_file(name, size_bytes, world);
    if (file < 0) {
      *error = fail(kNcclSystemError, "cannot make " + name);
      return nullptr;
    }
  } else if (!wait_until([&] { return (file = open(name.c_str(), O_RDWR | O_CLOEXEC)) >= 0; }, is_stopped)) {
    *error = fail(kNcclInternalError, "stopped before rank 0 came");
    return nullptr;
  }
  int found = 0;
  if (pread(file, &found, sizeof found, 0) != sizeof found || found != world) {
    close(file);
    *error = fail(kNcclInvalidArgument, "rank 0 makes a communicator of " + std::to_string(found) + " ranks, rank " +
                                            std::to_string(rank) + " one of " + std::to_string(world));
    return nullptr;
  }
  void* const data = mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (data == MAP_FAILED) {
    *error = fail(kNcclSystemError, "cannot map " + name);
    return nullptr;
  }
  std::shared_ptr<Board> board(new Board(data, size_bytes, rank, world));
  Head& head = *board->head_;
  if (head.is_taken[rank].exchange(1) != 0) {
    *error = fail(kNcclInvalidUsage, "two ranks are rank " + std::to_string(rank));
    return nullptr;
  }
  if (++head.joined == world) {
    unlink(name.c_str());
  }
  const auto is_complete = [&] { return head.joined == world; };
  if (!wait_until(is_complete, is_stopped) && !is_complete()) {
    if (rank == 0) {
      unlink(name.c_str());
    }
    *error = fail(kNcclInternalError, "stopped before all ranks came");
    return nullptr;
  }
  return board;
}

}  // namespace fake_nccl
