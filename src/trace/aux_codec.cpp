// Records other than events: few, small, variable; a checked cursor over length-prefixed strings.
#include <cstring>
#include <string_view>

#include "trace/codec.h"

namespace assay::codec {
namespace {

// Values one behind the other, little-endian as in memory; no padding between them.
class Out {
 public:
  template <class T>
  Out& Value(T value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return *this;
  }
  Out& Text(std::string_view text) {
    Value(static_cast<uint32_t>(text.size()));
    bytes_.append(text);
    return *this;
  }
  std::string Take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

// Every read past the end fails once and for all; values are then zero and strings empty.
class In {
 public:
  explicit In(std::span<const unsigned char> bytes) : rest_(bytes) {}

  template <class T>
  In& Value(T* out) {
    *out = T{};
    if (Need(sizeof(T))) {
      std::memcpy(out, rest_.data(), sizeof(T));
      rest_ = rest_.subspan(sizeof(T));
    }
    return *this;
  }
  // The length is checked before anything is allocated.
  In& Text(std::string* out) {
    out->clear();
    uint32_t length = 0;
    Value(&length);
    if (Need(length)) {
      out->assign(reinterpret_cast<const char*>(rest_.data()), length);
      rest_ = rest_.subspan(length);
    }
    return *this;
  }
  // An element count; fails when that many elements of min_bytes each cannot be there, so no forged count allocates.
  uint64_t Count(uint64_t min_bytes) {
    uint64_t n = 0;
    Value(&n);
    if (!good_ || n > rest_.size() / min_bytes) good_ = false;
    return good_ ? n : 0;
  }
  bool good() const { return good_; }

 private:
  // False as well once an earlier read failed, so a chain of reads is asked once, at its end.
  bool Need(size_t n) {
    if (n > rest_.size()) good_ = false;
    return good_;
  }

  std::span<const unsigned char> rest_;
  bool good_ = true;
};

}  // namespace

std::string EncodeProcess(const ProcessInfo& p) {
  Out out;
  out.Value(p.pid).Value(p.rank).Value(p.world_size).Value(p.start_time_ns).Text(p.host).Text(p.cwd);
  out.Value(uint64_t{p.command.size()});
  for (const std::string& word : p.command) out.Text(word);
  out.Value(uint64_t{p.meta.size()});
  for (const auto& [key, value] : p.meta) out.Text(key).Text(value);
  return out.Take();
}

// In each pair below, the two functions name the fields in the order of the table in docs/trace-format.md, "Kinds". 4
// and 8 are the bytes of an empty text and of two.
bool DecodeProcess(std::span<const unsigned char> body, ProcessInfo* p) {
  In in(body);
  in.Value(&p->pid).Value(&p->rank).Value(&p->world_size).Value(&p->start_time_ns).Text(&p->host).Text(&p->cwd);
  p->command.resize(in.Count(4));
  for (std::string& word : p->command) in.Text(&word);
  p->meta.resize(in.Count(8));
  for (auto& [key, value] : p->meta) in.Text(&key).Text(&value);
  return in.good();
}

std::string EncodeSite(const SiteInfo& site) {
  return Out().Value(site.id).Text(site.name).Text(site.engine_name).Text(site.axes).Take();
}

bool DecodeSite(std::span<const unsigned char> body, SiteInfo* site) {
  return In(body).Value(&site->id).Text(&site->name).Text(&site->engine_name).Text(&site->axes).good();
}

std::string EncodeRequest(const RequestInfo& r) {
  Out out;
  out.Value(r.key).Value(r.prompt_tokens).Value(r.ordinal).Text(r.engine_id).Value(uint64_t{r.tokens.size()});
  for (int64_t token : r.tokens) out.Value(token);
  return out.Take();
}

bool DecodeRequest(std::span<const unsigned char> body, RequestInfo* r) {
  In in(body);
  in.Value(&r->key).Value(&r->prompt_tokens).Value(&r->ordinal).Text(&r->engine_id);
  r->tokens.resize(in.Count(8));
  for (int64_t& token : r->tokens) in.Value(&token);
  return in.good();
}

std::string EncodeCoverage(const CoverageNote& note) {
  return Out().Text(note.site).Text(note.reason).Value(note.count).Text(note.detail).Take();
}

bool DecodeCoverage(std::span<const unsigned char> body, CoverageNote* note) {
  return In(body).Text(&note->site).Text(&note->reason).Value(&note->count).Text(&note->detail).good();
}

std::string EncodeMeta(const std::string& key, const std::string& value) { return Out().Text(key).Text(value).Take(); }

bool DecodeMeta(std::span<const unsigned char> body, std::string* key, std::string* value) {
  return In(body).Text(key).Text(value).good();
}

}  // namespace assay::codec
