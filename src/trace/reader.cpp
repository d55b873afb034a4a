#include "trace/reader.h"

#include <algorithm>
#include <exception>
#include <map>
#include <mutex>
#include <tuple>
#include <unordered_map>

#include "base/files.h"
#include "base/hex.h"
#include "base/mapped_file.h"
#include "base/parallel_for.h"
#include "base/sha256.h"
#include "trace/event_layout.h"
#include "trace/format.h"
#include "trace/payload_store.h"
#include "trace/trace_file.h"

namespace assay {
namespace {

std::span<const unsigned char> AsBytes(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size()};
}

// Runs a part of opening; what memory cannot be had for is an error like any other.
template <class F>
auto Guarded(const std::string& path, F&& body) -> decltype(body()) {
  try {
    return body();
  } catch (const std::exception& error) {
    return Status::Environment(path + ": not enough memory to index the trace (" + error.what() + ")");
  }
}

bool HasSuffix(const std::string& text, std::string_view suffix) {
  return text.size() > suffix.size() && text.compare(text.size() - suffix.size(), suffix.size(), suffix) == 0;
}

}  // namespace

// Built by one thread; afterwards only the payload tables change, under their mutex.
struct Trace::Impl {
  // One readable file with its bytes.
  struct File {
    MappedFile mapping;
    std::span<const unsigned char> bytes;
    TraceFileIndex index;
    Status status;
    std::vector<uint32_t> global_sites;
    EventView::Layout layout;
  };

  std::string path;
  std::string dir;  // where payloads/ lies
  std::vector<std::unique_ptr<File>> files;
  std::vector<uint64_t> first_event;  // of each file, and the total behind
  std::vector<TraceProcess> processes;
  std::vector<Damage> damages;
  std::vector<std::string> site_names;
  mutable std::mutex payload_mutex;
  mutable std::map<std::string, MappedFile> payloads;  // verified ones, by hash
  mutable std::map<std::string, Damage> bad_payloads;  // by hash; under payload_mutex

  // Keeps the error as damage of the payload and passes it on.
  Status BadPayload(const std::string& name, const std::string& file, uint64_t size_bytes, std::string what) const {
    Status status = Status::BadInput(file + ": " + what);
    bad_payloads.try_emplace(name, Damage{file, 0, size_bytes, std::move(what), false});
    return status;
  }

  // Joins the indexed files: order, damages, processes, global site numbers.
  Status Join() {
    // Files that cannot be read at all become damages; benign when their writer was killed while it opened them.
    std::erase_if(files, [this](const std::unique_ptr<File>& file) {
      if (file->status.ok()) return false;
      const bool mapped = !file->mapping.path().empty();
      const bool opening = mapped && (file->bytes.size() < format::kHeaderBytes || file->bytes[0] == 0);
      damages.push_back({file->index.process.file, 0, file->bytes.size(), file->status.message(), opening});
      return true;
    });
    if (files.empty()) {
      std::string message = path + ": no readable trace file";
      if (!damages.empty()) message += "; " + damages[0].what;
      return Status::BadInput(message);
    }
    std::stable_sort(files.begin(), files.end(), [](const auto& a, const auto& b) {
      const ProcessInfo& x = a->index.process.info;
      const ProcessInfo& y = b->index.process.info;
      return std::tie(x.rank, x.start_time_ns, a->index.process.file) <
             std::tie(y.rank, y.start_time_ns, b->index.process.file);
    });
    std::unordered_map<std::string, uint32_t> numbers;
    first_event.push_back(0);
    for (size_t f = 0; f < files.size(); ++f) {
      File& file = *files[f];
      for (const SiteInfo& site : file.index.process.sites) {
        const auto [at, is_new] = numbers.emplace(site.name, static_cast<uint32_t>(site_names.size()));
        if (is_new) site_names.push_back(site.name);
        file.global_sites.push_back(at->second);
      }
      file.layout = {static_cast<uint32_t>(f), file.bytes.data(), file.global_sites.data()};
      first_event.push_back(first_event.back() + file.index.events.size());
      damages.insert(damages.end(), file.index.damages.begin(), file.index.damages.end());
      processes.push_back(std::move(file.index.process));
    }
    return {};
  }
};

Trace::Trace() : impl_(std::make_unique<Impl>()) {}
Trace::~Trace() = default;

Result<std::unique_ptr<Trace>> Trace::Open(const std::string& path) {
  return Guarded(path, [&] { return OpenPath(path); });
}

// All files are mapped before one is indexed, so that one that vanishes meanwhile is still read.
Result<std::unique_ptr<Trace>> Trace::OpenPath(const std::string& path) {
  std::unique_ptr<Trace> trace(new Trace());
  Impl& impl = *trace->impl_;
  impl.path = path;
  std::vector<std::string> paths;
  if (IsDirectory(path)) {
    impl.dir = path;
    ASSAY_ASSIGN_OR_RETURN(const std::vector<std::string> names, ListDir(path));
    for (const std::string& name : names) {
      if (HasSuffix(name, format::kFileSuffix)) paths.push_back(path + "/" + name);
    }
    if (paths.empty()) return Status::BadInput(path + ": no trace in this folder (no *.assay file)");
  } else {
    if (!FileExists(path)) return Status::BadInput(path + ": no such trace folder or file");
    const size_t slash = path.rfind('/');
    impl.dir = slash == std::string::npos ? "." : path.substr(0, slash);
    paths.push_back(path);
  }
  for (const std::string& file_path : paths) {
    auto file = std::make_unique<Impl::File>();
    file->index.process.file = file_path;
    Result<MappedFile> mapping = MappedFile::Open(file_path);
    if (mapping.ok()) {
      file->mapping = std::move(mapping).value();
      file->bytes = AsBytes(file->mapping.bytes());
    } else {
      file->status = mapping.status();
    }
    impl.files.push_back(std::move(file));
  }
  ParallelFor(static_cast<int64_t>(impl.files.size()), 0, [&](int64_t i) {
    Impl::File& file = *impl.files[static_cast<size_t>(i)];
    if (!file.status.ok()) return;
    const auto first_nonzero = [&](uint64_t from) { return file.mapping.FirstNonZero(from); };
    file.status = Guarded(file.mapping.path(),
                          [&] { return IndexTraceFile(file.bytes, file.mapping.path(), first_nonzero, &file.index); });
  });
  for (const auto& file : impl.files) {
    if (!file->status.ok() && NeedsNewerReader(file->bytes)) return file->status;
  }
  ASSAY_RETURN_IF_ERROR(impl.Join());
  return trace;
}

Result<std::unique_ptr<Trace>> Trace::FromBytes(std::span<const unsigned char> bytes, const std::string& name) {
  std::unique_ptr<Trace> trace(new Trace());
  Impl& impl = *trace->impl_;
  impl.path = name;
  impl.dir = ".";
  auto file = std::make_unique<Impl::File>();
  file->bytes = bytes;
  const auto first_nonzero = [&](uint64_t from) {
    while (from < bytes.size() && bytes[from] == 0) ++from;
    return from;
  };
  ASSAY_RETURN_IF_ERROR(IndexTraceFile(bytes, name, first_nonzero, &file->index));
  impl.files.push_back(std::move(file));
  ASSAY_RETURN_IF_ERROR(impl.Join());
  return trace;
}

const std::string& Trace::path() const { return impl_->path; }
const std::vector<TraceProcess>& Trace::processes() const { return impl_->processes; }
const std::vector<Damage>& Trace::damages() const { return impl_->damages; }
const std::vector<std::string>& Trace::site_names() const { return impl_->site_names; }
uint64_t Trace::event_count() const { return impl_->first_event.back(); }

EventView Trace::event(uint64_t i) const {
  const auto& first = impl_->first_event;
  // Few files: the search is a handful of comparisons. upper_bound skips files without events.
  const size_t f =
      first.size() == 2 ? 0 : static_cast<size_t>(std::upper_bound(first.begin(), first.end(), i) - first.begin()) - 1;
  const Impl::File& file = *impl_->files[f];
  EventView view;
  view.layout_ = &file.layout;
  view.record_ = file.layout.base + file.index.events[i - first[f]];
  return view;
}

// The name is made of the hash's 32 bytes and not of the text, so a forged reference cannot lead to another path. A
// mapping whose content is wrong is not kept: every call for it fails anew.
Result<std::span<const std::byte>> Trace::payload(const PayloadRef& ref) const {
  Sha256::Digest wanted;
  if (!HexDecode(ref.sha256, wanted.data(), wanted.size())) {
    return Status::BadInput(impl_->path + ": payload hash is not 64 hex digits");
  }
  const std::string name = HexEncode(wanted.data(), wanted.size());
  const std::string file_path = impl_->dir + "/" + kPayloadFolder + "/" + name;
  // Held while the hash is computed: two threads that want the same payload hash it once.
  const std::lock_guard<std::mutex> lock(impl_->payload_mutex);
  auto found = impl_->payloads.find(name);
  if (found == impl_->payloads.end()) {
    Result<MappedFile> mapping = MappedFile::Open(file_path);
    if (!mapping.ok()) {
      return impl_->BadPayload(name, file_path, ref.size_bytes, "the payload cannot be read or is missing");
    }
    if (Sha256::Of(mapping->bytes().data(), mapping->bytes().size()) != wanted) {
      return impl_->BadPayload(name, file_path, ref.size_bytes,
                               "content does not match its SHA-256; the payload is damaged");
    }
    found = impl_->payloads.emplace(name, std::move(mapping).value()).first;
  }
  const std::span<const std::byte> bytes = found->second.bytes();
  if (bytes.size() != ref.size_bytes) {
    return impl_->BadPayload(name, file_path, ref.size_bytes,
                             std::to_string(bytes.size()) + " bytes, the event says " + std::to_string(ref.size_bytes));
  }
  return bytes;
}

std::vector<Damage> Trace::payload_damages() const {
  const std::lock_guard<std::mutex> lock(impl_->payload_mutex);
  std::vector<Damage> out;
  for (const auto& [name, damage] : impl_->bad_payloads) out.push_back(damage);
  return out;
}

}  // namespace assay
