// What can be set: every variable and every profile, as the parser, the help texts and the docs know them.
#include "probe/settings.h"

namespace assay {
namespace {

// Order: what, where, how much, then the rare ones; docs/settings.md keeps it. The text is printed as it stands.
constexpr SettingHelp kSettings[] = {
    {"ASSAY", "PROFILE[:SINK]", "off",
     "Master gate: all, attn, mla, mlp, moe, io, or off. SINK stderr prints a line an event instead of a trace."},
    {"ASSAY_DIR", "PATH", "assay-trace-%p",
     "Trace folder; %r rank, %p pid, %h host, %i next free number, %% a percent."},
    {"ASSAY_LEVEL", "names|shapes|stats|sample[:ROWS]|payload", "stats",
     "What is kept of a tensor. sample keeps ROWS seeded rows (default 8), payload all of it: both are content."},
    {"ASSAY_INCLUDE", "PATTERN[,PATTERN...]", "the profile's",
     "Sites to record: globs over the whole name, or /regex/ anywhere in it. Replaces the profile's own list."},
    {"ASSAY_EXCLUDE", "PATTERN[,PATTERN...]", "none", "Sites to leave out; wins over ASSAY_INCLUDE."},
    {"ASSAY_LAYERS", "INTERVALS", "all", "Layers, as in 0,1,4-6 or 3-. Sites outside the layers are kept."},
    {"ASSAY_RANKS", "INTERVALS", "all", "Ranks that record."},
    {"ASSAY_STEPS", "INTERVALS", "all", "Engine steps that record. Events without a step are kept."},
    {"ASSAY_BUDGET", "SIZE | [events=SIZE][,payload=SIZE]", "events=4GiB,payload=1GiB",
     "Bytes a process may write; beyond it observations are dropped and counted. One SIZE sets both caps."},
    {"ASSAY_GRIDS", "rows[,heads] | heads | none", "rows,heads", "Grids kept beside the statistics of a segment."},
    {"ASSAY_THREADS", "1..256", "1", "Threads of one statistics pass over a large tensor."},
    {"ASSAY_SEGMENT", "1..65536", "64",
     "Positions a segment; without row grids, traces compare only with the same value."},
    {"ASSAY_SEED", "0..18446744073709551615", "0", "Seed of the rows that level sample keeps."},
    {"ASSAY_RING", "STEPS", "0",
     "On-anomaly: keep the last STEPS steps in memory, write them when a non-finite value appears. 0 writes at once."},
    {"ASSAY_TOKENS", "on|off", "off", "Store token ids (content): prompts and next_token."},
    {"ASSAY_PROBES", "SELECTOR[,SELECTOR...]", "none",
     "Probes of your own in a Python host: module:GLOB[:out], call:DOTTED, local:DOTTED:NAME[#N|#last], "
     "audit:DOTTED:NAME."},
    {"ASSAY_ATTACH", "PROFILE[,PROFILE...] | all | none", "all",
     "Profiles that attach to a Python host: torch, transformers, vllm, or the dotted name of a module of your own."},
    {"ASSAY_ARMED", "on|off", "on", "off: nothing is recorded until assay arm."},
    {"ASSAY_STRICT", "on|off", "off", "At close, a pattern that matched no site and a dropped event are errors."},
};

// Includes only: whoever wants less adds ASSAY_EXCLUDE. "mla" equals "attn" on purpose, as the paths differ by their
// sites.
constexpr ProfileHelp kProfiles[] = {
    {"all", "", "every site"},
    {"attn", "layers.*.attn.*,layers.*.input_norm,layers.*.out", "attention, its input and the layer's result"},
    {"mla", "layers.*.attn.*,layers.*.input_norm,layers.*.out", "the same; the name people look for"},
    {"mlp", "layers.*.mlp.*,layers.*.post_norm,layers.*.out", "dense feed-forward, its input and the layer's result"},
    {"moe", "layers.*.moe.*,layers.*.post_norm,layers.*.out", "router, experts and combine"},
    {"io", "embed,layers.*.out,final_norm,logits,next_token*", "one site a layer, what enters and what leaves"},
};

}  // namespace

std::span<const SettingHelp> AllSettings() { return kSettings; }
std::span<const ProfileHelp> AllProfiles() { return kProfiles; }

}  // namespace assay
