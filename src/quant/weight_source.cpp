#include "quant/weight_source.h"

#include <dirent.h>

#include <algorithm>

#include "base/files.h"
#include "base/mapped_file.h"
#include "io/gguf.h"
#include "io/text_file.h"
#include "quant/assemble.h"

namespace assay {
namespace {

constexpr uint64_t kMaxConfigBytes = 16u << 20;

// Of a file's path.
std::string FolderOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, slash);
}

// The files of a GGUF model: path itself, or all of a split one ("…-00001-of-00003.gguf").
Result<std::vector<std::string>> GgufFiles(const std::string& path) {
  constexpr std::string_view kFirst = "-00001-of-";
  const size_t at = path.rfind(kFirst);
  if (at == std::string::npos || path.size() != at + kFirst.size() + 10 || !path.ends_with(".gguf"))
    return std::vector{path};
  const int count = std::atoi(path.substr(at + kFirst.size(), 5).c_str());
  std::vector<std::string> files;
  for (int i = 1; i <= count; ++i) {
    char number[8];
    std::snprintf(number, sizeof number, "%05d", i % 100000);
    files.push_back(path.substr(0, at + 1) + number + path.substr(at + 6));
    if (!FileExists(files.back())) return Status::BadInput(files.back() + ": no such file; it is a part of " + path);
  }
  return files;
}

// What the metadata of file `index` of `count` says of the split must be what the names say.
Status CheckSplit(const GgufFile& file, const std::string& name, size_t index, size_t count) {
  const auto says = [&](const char* key, int64_t absent) {
    const GgufValue* value = file.find(key);
    return value == nullptr ? absent : value->integer().value_or(absent);
  };
  const int64_t all = static_cast<int64_t>(count), files = says("split.count", all);
  if (files != all && !(files == 0 && count == 1)) {
    return Status::BadInput(name + ": split.count says that the model has " + std::to_string(files) +
                            " files, by its name it has " + std::to_string(count) +
                            "; give the first of all (…-00001-of-0000N.gguf)");
  }
  const int64_t place = says("split.no", static_cast<int64_t>(index));
  if (place == static_cast<int64_t>(index)) return {};
  return Status::BadInput(name + ": split.no says that it is file " + std::to_string(place + 1) + ", its name says " +
                          std::to_string(index + 1));
}

// Rows of llama's queries and keys lie in an order that depends on the heads.
Status CheckHeads(const GgufFile& file, const std::string& name) {
  const GgufParts parts = PartsFromGguf(file);
  if (parts.architecture != "llama" || parts.n_heads > 0) return {};
  for (const GgufTensor& t : file.tensors) {
    if (t.name.ends_with(".attn_q.weight")) {
      return Status::BadInput(name + ": the metadata has no llama.attention.head_count, without which the rows of \"" +
                              t.name + "\" cannot be put in order");
    }
  }
  return {};
}

// The one model of a folder without safetensors; empty when there is none.
Result<std::string> GgufOfFolder(const std::string& folder) {
  std::vector<std::string> found;
  if (DIR* dir = ::opendir(folder.c_str())) {
    while (const dirent* entry = ::readdir(dir)) {
      const std::string name = entry->d_name;
      const bool later_part = name.find("-of-") != std::string::npos && name.find("-00001-of-") == std::string::npos;
      if (name.ends_with(".gguf") && !later_part) found.push_back(folder + "/" + name);
    }
    ::closedir(dir);
  }
  std::sort(found.begin(), found.end());
  if (found.size() > 1)
    return Status::BadInput(folder + ": several GGUF models (" + found[0] + ", " + found[1] + "); name one");
  return found.empty() ? std::string() : found[0];
}

// What stands behind the experts' number is one of the assembler's own suffixes, which have no "*".
bool IsOf(const WeightProblem& problem, std::string_view name) {
  if (!problem.of_experts) return name == problem.name || name.starts_with(problem.name + ".");
  const size_t star = problem.name.rfind('*');
  const std::string_view before = std::string_view(problem.name).substr(0, star),
                         behind = std::string_view(problem.name).substr(star + 1);
  if (name.size() <= before.size() + behind.size() || !name.starts_with(before) || !name.ends_with(behind))
    return false;
  const std::string_view number = name.substr(before.size(), name.size() - before.size() - behind.size());
  return number.find_first_not_of("0123456789") == std::string_view::npos;
}

}  // namespace

struct WeightSource::Impl {
  std::string path, config_file;
  bool gguf = false;
  Json config;
  std::shared_ptr<const Checkpoint> checkpoint;  // safetensors
  std::vector<MappedFile> files;                 // GGUF
  std::vector<CheckpointTensor> stored;
  std::vector<uint32_t> types;  // GGUF, beside stored
  std::vector<WeightPtr> weights;
  WeightAssembly assembly;

  // A checkpoint without config.json is read by what its tensors say about themselves.
  Status OpenSafetensors() {
    ASSAY_ASSIGN_OR_RETURN(checkpoint, Checkpoint::Open(path));
    stored = checkpoint->tensors();
    config_file = (IsDirectory(path) ? path : FolderOf(path)) + "/config.json";
    if (FileExists(config_file)) {
      ASSAY_ASSIGN_OR_RETURN(const std::string text, ReadTextFile(config_file, kMaxConfigBytes));
      ASSAY_ASSIGN_OR_RETURN(config, ParseJson(text, config_file));
      if (!config.is_object()) return Status::BadInput(config_file + ": at offset 0 there is no JSON object");
    }
    AssembleSafetensors(stored, ReadQuantSettings(config), &assembly);
    return {};
  }

  // Parts of a split model: metadata is the first one's, tensors are of all.
  Status OpenGguf(const std::string& first) {
    ASSAY_ASSIGN_OR_RETURN(const std::vector<std::string> names, GgufFiles(first));
    std::vector<GgufFile> parsed;
    for (const std::string& name : names) {
      ASSAY_ASSIGN_OR_RETURN(MappedFile mapped, MappedFile::Open(name));
      ASSAY_ASSIGN_OR_RETURN(GgufFile file, ParseGguf(mapped.bytes().data(), mapped.bytes().size(), name));
      ASSAY_RETURN_IF_ERROR(CheckSplit(file, name, parsed.size(), names.size()));
      files.push_back(std::move(mapped));
      AddGguf(file, name);
      parsed.push_back(std::move(file));
    }
    config_file = first;
    ASSAY_RETURN_IF_ERROR(CheckHeads(parsed.front(), first));
    return FinishGguf(parsed.front());
  }

  void AddGguf(const GgufFile& file, const std::string& name) {
    for (const GgufTensor& t : file.tensors) {
      CheckpointTensor tensor;
      tensor.name = t.name;
      tensor.shape = t.shape;
      tensor.data = t.data;
      tensor.size_bytes = t.size_bytes;
      tensor.file = name;
      tensor.file_offset = t.file_offset;
      stored.push_back(std::move(tensor));
      types.push_back(t.type->id);
    }
  }

  Status FinishGguf(const GgufFile& first) {
    gguf = true;
    config = ConfigFromGguf(first, stored);
    AssembleGguf(stored, types, PartsFromGguf(first), &assembly);
    return {};
  }

  void Finish() {
    for (auto& [name, weight] : assembly.weights) weights.push_back(weight);
  }
};

WeightSource::WeightSource() : impl_(std::make_unique<Impl>()) {}
WeightSource::~WeightSource() = default;

Result<std::shared_ptr<const WeightSource>> WeightSource::Open(const std::string& path) {
  std::shared_ptr<WeightSource> source(new WeightSource);
  Impl& impl = *source->impl_;
  impl.path = path;
  std::string gguf = path.ends_with(".gguf") ? path : "";
  if (IsDirectory(path) && !FileExists(path + "/model.safetensors") &&
      !FileExists(path + "/model.safetensors.index.json")) {
    ASSAY_ASSIGN_OR_RETURN(gguf, GgufOfFolder(path));
  }
  ASSAY_RETURN_IF_ERROR(gguf.empty() ? impl.OpenSafetensors() : impl.OpenGguf(gguf));
  impl.Finish();
  return std::shared_ptr<const WeightSource>(std::move(source));
}

std::shared_ptr<const WeightSource> WeightSource::FromCheckpoint(std::shared_ptr<const Checkpoint> checkpoint,
                                                                 const Json& config) {
  std::shared_ptr<WeightSource> source(new WeightSource);
  Impl& impl = *source->impl_;
  impl.path = checkpoint->path();
  impl.stored = checkpoint->tensors();
  impl.checkpoint = std::move(checkpoint);
  impl.config = config;
  AssembleSafetensors(impl.stored, ReadQuantSettings(config), &impl.assembly);
  impl.Finish();
  return source;
}

Result<std::shared_ptr<const WeightSource>> WeightSource::FromGguf(const std::byte* data, uint64_t size_bytes,
                                                                   const std::string& file) {
  std::shared_ptr<WeightSource> source(new WeightSource);
  source->impl_->path = source->impl_->config_file = file;
  ASSAY_ASSIGN_OR_RETURN(const GgufFile parsed, ParseGguf(data, size_bytes, file));
  source->impl_->AddGguf(parsed, file);
  ASSAY_RETURN_IF_ERROR(source->impl_->FinishGguf(parsed));
  source->impl_->Finish();
  return std::shared_ptr<const WeightSource>(std::move(source));
}

const std::string& WeightSource::path() const { return impl_->path; }
bool WeightSource::is_gguf() const { return impl_->gguf; }
const Json& WeightSource::config() const { return impl_->config; }
std::string WeightSource::config_file() const { return impl_->config_file; }
const std::vector<WeightPtr>& WeightSource::weights() const { return impl_->weights; }
const std::vector<WeightProblem>& WeightSource::problems() const { return impl_->assembly.problems; }
const std::vector<std::string>& WeightSource::others() const { return impl_->assembly.others; }
const std::vector<CheckpointTensor>& WeightSource::stored() const { return impl_->stored; }

const Weight* WeightSource::find(std::string_view name) const {
  const auto at = std::lower_bound(impl_->weights.begin(), impl_->weights.end(), name,
                                   [](const WeightPtr& w, std::string_view n) { return w->name() < n; });
  return at != impl_->weights.end() && (*at)->name() == name ? at->get() : nullptr;
}

const WeightProblem* FindProblem(const WeightSource& source, const std::string& name) {
  for (const WeightProblem& problem : source.problems()) {
    if (IsOf(problem, name)) return &problem;
  }
  return nullptr;
}

// Multimodal checkpoints put their language model under one of several prefixes.
std::string CanonicalWeightName(std::string_view name) {
  for (const std::string_view prefix : {"model.language_model.", "language_model.model.", "model."}) {
    if (name.substr(0, prefix.size()) == prefix) {
      name.remove_prefix(prefix.size());
      break;
    }
  }
  if (name.substr(0, 15) == "language_model.") name.remove_prefix(15);
  std::string out(name);
  if (const size_t at = out.find(".self_attn."); at != std::string::npos) out.replace(at, 11, ".attn.");
  return out;
}

}  // namespace assay
