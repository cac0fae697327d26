// SPDX-License-Identifier: Apache-2.0

package modelconfig

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// CheckExpertEntries rejects a JSON configuration that may refer to experts by number in an entry that cannot be
// rewritten without knowing its order of experts: maps with numeric keys, lists with as many entries as experts, lists
// of numbers that may be expert numbers, and numbers under names related to experts. Names of modules and patterns are
// not checked. The error contains the path of the entry.
func CheckExpertEntries(text []byte, experts, layers int) error {
	return checkEntries(text, entryReader{experts: experts, layers: layers})
}

// CheckForeignEntries also rejects counts whose meaning only the code of an unknown family contains, and by which the
// number of an expert may matter: groups of experts, and the number of experts of a kind, such as those that are always
// active.
func CheckForeignEntries(text []byte, experts, layers int) error {
	return checkEntries(text, entryReader{experts: experts, layers: layers, foreign: true})
}

func checkEntries(text []byte, r entryReader) error {
	r.decoder = json.NewDecoder(bytes.NewReader(Strict(text)))
	r.decoder.UseNumber()
	if _, err := r.value(nil); err != nil {
		return err
	}
	if _, err := r.decoder.Token(); !errors.Is(err, io.EOF) {
		return fmt.Errorf("not valid JSON: text after the value")
	}
	return nil
}

// maxPredictionLayers is the maximum number of layers of multi-token prediction. Known models have at most three.
const maxPredictionLayers = 3

// maxEntryDepth is the maximum nesting depth of a configuration.
const maxEntryDepth = 64

// entryReader reads a configuration token by token, so that memory use does not depend on its size.
type entryReader struct {
	experts, layers int
	// foreign reports that the family is unknown.
	foreign bool
	decoder *json.Decoder
}

// entry describes a value for the container of the value.
type entry struct {
	// number is set for a number, id for a number that may be an expert number, and module for the name of a module or
	// a pattern of names. index is also set for a negative number, which Python counts from the end of a list. several
	// is set for an integer above 1.
	number, id, index, module, several bool
}

// value reads a value. path contains the names of the enclosing members. Values of neutral members are skipped.
func (r *entryReader) value(path []string) (entry, error) {
	token, err := r.decoder.Token()
	if err != nil {
		return entry{}, fmt.Errorf("not valid JSON: %v", err)
	}
	if len(path) > maxEntryDepth {
		return entry{}, fmt.Errorf("%s: nested deeper than %d levels", strings.Join(path[:4], "."), maxEntryDepth)
	}
	switch token := token.(type) {
	case json.Delim:
		if token == '[' {
			return entry{}, r.array(path)
		}
		return entry{}, r.object(path)
	case json.Number:
		n, err := token.Int64()
		if isMask(path) {
			return entry{}, r.refuse(path, "it may be a set or an order of experts")
		}
		inRange := err == nil && n >= -int64(r.experts) && n < int64(r.experts)
		return entry{number: true, id: inRange && n >= 0, index: inRange, several: err == nil && n > 1}, nil
	case string:
		if namesUnknown(token) && !neutral(path) {
			return entry{}, r.refuse(path, "%.100q names an expert in an unknown form", token)
		}
		isList := numbers.MatchString(token) && (RelatesToExperts(strings.Join(path, ".")) || r.listsExperts(token) && !hasWord(path, plainWords) && !isCount(memberName(path)))
		if (isList || bitSet.MatchString(token) && isMask(path)) && !neutral(path) {
			return entry{}, r.refuse(path, "%.100q may be a list of experts", token)
		}
		return entry{module: isModule(token)}, nil
	}
	return entry{}, nil
}

// numbers matches a string that is a list of numbers.
var numbers = regexp.MustCompile(`^[\s,;:|()\[\]-]*\d[\d\s,;:|()\[\]-]*$`)

// listsExperts reports whether a string that is a list of numbers has several numbers, and all of them may be expert
// numbers.
func (r *entryReader) listsExperts(list string) bool {
	found := digits.FindAllString(list, -1)
	return len(found) > 1 && !slices.ContainsFunc(found, func(number string) bool {
		n, err := strconv.Atoi(number)
		return err != nil || n >= r.experts
	})
}

// maskWord matches names of members that may contain a set or an order of experts in one value. bitSet matches such a
// value in a string.
var (
	maskWord = regexp.MustCompile(`(?i)mask|bitmap|bitset|bit_set|perm|order|placement|mapping|assign`)
	bitSet   = regexp.MustCompile(`^(?:0[xXbB])?[0-9A-Fa-f]{2,}$`)
)

// isMask reports whether a value may be a set or an order of experts.
func isMask(path []string) bool {
	member := memberName(path)
	return maskWord.MatchString(member) && !isCount(member) && RelatesToExperts(strings.Join(path, ".")) && !neutral(path)
}

func (r *entryReader) object(path []string) error {
	stems, keys := map[string]int{}, 0
	for r.decoder.More() {
		token, err := r.decoder.Token()
		if err != nil {
			return fmt.Errorf("not valid JSON: %v", err)
		}
		key := token.(string) // object keys are always strings
		inner := append(slices.Clip(path), key)
		value, err := r.value(inner)
		if err != nil {
			return err
		}
		keys++
		if namesUnknown(key) && !neutral(inner) {
			return r.refuse(inner, "the name is that of an expert, in an unknown form")
		}
		if numberPath.MatchString(key) && !neutral(path) && !isKeyedByLayer(path) {
			return r.refuse(path, "its member %.100q may contain an expert number", key)
		}
		if r.foreign && !neutral(inner) && (value.several && isGrouping(key) || value.id && isUnknownCount(key)) {
			return r.refuse(inner, "its meaning is unknown")
		}
		switch _, err := strconv.ParseUint(key, 10, 64); {
		case neutral(path):
		case err == nil && !isKeyedByLayer(path):
			return r.refuse(path, "its member %q may be an expert number", key)
		case value.id && RelatesToExperts(strings.Join(inner, ".")) && !neutral(inner) && !isCount(key):
			return r.refuse(inner, "it may be an expert number")
		case err != nil:
			if stem := digits.ReplaceAllString(key, "#"); stem != key {
				stems[stem]++
			}
		}
	}
	for stem, count := range stems {
		if experts := r.experts; count >= experts && experts > 1 && !isModule(stem) && count != r.layers {
			return r.refuse(path, "it has a member %q for each expert", stem)
		}
	}
	_, err := r.decoder.Token()
	return jsonError(err)
}

var digits = regexp.MustCompile(`\d+`)

// isModule reports whether a key is the name of a module or a tensor, or a pattern of such names.
func isModule(key string) bool { return strings.ContainsAny(key, `.*\`) }

func (r *entryReader) array(path []string) error {
	length, numbersOnly, ids, modules := 0, true, true, true
	for r.decoder.More() {
		item, err := r.value(append(slices.Clip(path), "[]"))
		if err != nil {
			return err
		}
		length++
		numbersOnly, ids, modules = numbersOnly && item.number, ids && item.index, modules && item.module
	}
	if _, err := r.decoder.Token(); err != nil {
		return jsonError(err)
	}
	experts := r.experts
	switch {
	case length == experts && length != r.layers && slices.Contains(layerMembers, memberName(path)):
		return r.refuse(path, "it has an entry for each of %d experts", experts)
	case neutral(path) || length == 0 || experts < 2:
	case r.isPerLayer(path, length): // the numbers are settings of layers
	case length%experts == 0 && (numbersOnly || length == experts && !modules && !isModuleList(path)):
		return r.refuse(path, "it has %d entries, and a layer %d experts", length, experts)
	case ids && !hasWord(path, plainWords):
		return r.refuse(path, "its numbers may be expert numbers")
	}
	return nil
}

func jsonError(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("not valid JSON: %v", err)
}

// refuse returns the error for an entry.
func (r *entryReader) refuse(path []string, format string, args ...any) error {
	name := strings.ReplaceAll(strings.Join(path, "."), ".[]", "[]")
	if name == "" {
		name = "the configuration"
	}
	return fmt.Errorf("%.200s: its dependence on the order of the experts is unknown: "+format, append([]any{name}, args...)...)
}

var (
	// neutralMembers are members of configurations that never refer to experts, regardless of their value.
	neutralMembers = []string{
		"vision_config", "audio_config", "talker_config", "code2wav_config", "token2wav_config", "rope_scaling", "rope_parameters", "id2label", "label2id", "architectures", "auto_map", "eos_token_id", "bos_token_id",
		"pad_token_id", "mlp_only_layers", "moe_layer_freq", "is_moe_layer", "layer_types", "mlp_layer_types", "layers_block_type", "moe_layers", "moe_layers_enum", "moe_topk", "num_shared_expert",
		"moe_intermediate_size", "compress_ratios", "hybrid_layer_pattern", "added_tokens_decoder", "_name_or_path", "name_or_path",
		"base_model_name_or_path", "model_type", "transformers_version", "torch_dtype", "dtype", "weight_block_size", "version", "mrope_section", "bad_words_ids", "forced_decoder_ids",
	}
	// layerMembers are the neutral members that have an entry for each layer if they are lists.
	layerMembers = []string{"moe_intermediate_size", "moe_topk", "num_shared_expert"}
	// plainWords are words in names of members whose numbers are not expert numbers, unless the name is related to
	// experts.
	plainWords = []string{
		"layer", "token", "size", "shape", "dim", "head", "block", "window", "bits", "rope", "label", "lang", "image", "vision", "video", "audio", "pixel",
		"mean", "std", "stride", "kernel", "version", "visual", "section", "total", "attn", "attention", "limits", "factors", "ratios",
	}
	// countWords are parts of names of members that are counts or sizes.
	countWords = []string{
		"num", "n", "count", "size", "dim", "topk", "k", "per", "layer", "layers", "interval", "step", "freq", "frequency", "group", "groups", "parallel", "capacity",
		"width", "coef", "coeff", "factor", "bits", "rank", "eps", "alpha", "version", "loss", "limit", "degree", "noise", "dropout", "rate", "prob", "weight",
		"scale", "scaling", "ratio", "temperature", "logits", "init", "std", "seed", "length", "max", "min",
	}
)

// neutral reports whether a value is inside a member that does not refer to experts.
func neutral(path []string) bool { return slices.ContainsFunc(path, NeutralMember) }

// NeutralMember reports whether no value inside a member of a configuration refers to an expert.
func NeutralMember(name string) bool {
	return slices.Contains(neutralMembers, name) || strings.HasSuffix(name, "_token_ids")
}

// isCount reports whether a member is a count of experts, not an expert number.
func isCount(member string) bool {
	parts := strings.Split(strings.ToLower(member), "_")
	return slices.ContainsFunc(parts, func(part string) bool { return slices.Contains(countWords, part) })
}

// hasWord reports whether the name of the innermost member contains one of the words, and no name in the path is
// related to experts.
func hasWord(path, words []string) bool {
	name := strings.ToLower(memberName(path))
	return !RelatesToExperts(strings.Join(path, ".")) && slices.ContainsFunc(words, func(word string) bool { return strings.Contains(name, word) })
}

// memberName returns the innermost name of a path that is not an array entry.
func memberName(path []string) string {
	for _, member := range slices.Backward(path) {
		if member != "[]" {
			return member
		}
	}
	return ""
}

// isKeyedByLayer reports whether the numeric keys of a map are layers. A second level of numbers would be experts.
func isKeyedByLayer(path []string) bool { return hasWord(path, []string{"layer"}) }

// isPerLayer reports whether a list has an entry for each layer. Lists of models with multi-token prediction continue
// with its layers.
func (r *entryReader) isPerLayer(path []string, length int) bool {
	return length >= r.layers && length <= r.layers+maxPredictionLayers && hasWord(path, []string{"layer", "attn", "attention", "limits", "factors", "window", "rope"})
}

// isModuleList reports whether a list contains names of modules, or patterns of names, which are compared with the
// names of experts.
func isModuleList(path []string) bool {
	return slices.ContainsFunc(path, func(member string) bool {
		return slices.ContainsFunc([]string{"ignore", "exclude", "modules", "targets", "not_convert"}, func(word string) bool {
			return strings.Contains(strings.ToLower(member), word)
		})
	})
}

var (
	// expertWord matches words related to routed experts.
	expertWord = regexp.MustCompile(`(?i)expert|rout(?:er|ed|ing)|moe|eplb|e_score`)
	// sharedExpert matches the names of shared experts, which are not chosen by a gate.
	sharedExpert = regexp.MustCompile(`(?i)shared[_-]?experts?`)
	// numberedExpert matches a string that contains an expert number.
	numberedExpert = regexp.MustCompile(`(?i)experts?\W{0,3}_?\d|\d(?:st|nd|rd|th)?[ _-]?expert\b`)
)

var (
	// groupingWord matches the names of members that group experts. They have no shared meaning.
	groupingWord = regexp.MustCompile(`(?i)^num_groups$|group.*(?:expert|moe|rout|top_?k|gate)|(?:expert|moe|rout|top_?k|gate).*group`)
	// expertCount matches names of counts of experts. knownCount matches those that do not distinguish experts.
	expertCount = regexp.MustCompile(`(?i)^(?:\w+_)?(?:num|n|count|first|last)_(?:\w+_)?experts?$|experts?_(?:count|num)$`)
	knownCount  = regexp.MustCompile(`(?i)^(?:moe_)?(?:num|n)_(?:local_|routed_|moe_|selected_|activated_|active_)?experts$`)
	// knownGroups are the names that the operator reads.
	knownGroups = []string{"n_group", "topk_group", "num_expert_group"}
)

// isGrouping reports whether a member may state that a gate chooses among groups of experts.
func isGrouping(member string) bool {
	return groupingWord.MatchString(member) && !slices.Contains(knownGroups, member)
}

// isUnknownCount reports whether a member may be the number of experts of a kind.
func isUnknownCount(member string) bool {
	member = sharedExpert.ReplaceAllString(member, "")
	return expertCount.MatchString(member) && !knownCount.MatchString(member)
}

// shortName matches abbreviated names of one expert, such as e3 and L1E3. numberPath matches several numbers, such as
// the layer and the expert in 1.3, or the first and the last expert in 0-5.
var (
	shortName  = regexp.MustCompile(`(?i)^(?:l(?:ayer)?[-_.]?\d+[-_./:]?)?e(?:xp)?[-_.]?\d+$`)
	numberPath = regexp.MustCompile(`^\d+(?:[-./:,_ ]+\d+)+$`)
)

// namesUnknown reports whether a string names an expert and is neither the path of a module nor a pattern.
func namesUnknown(text string) bool {
	return NamesExpert(text) && !isModule(text) || shortName.MatchString(text)
}

// RelatesToExperts reports whether a name is related to routed experts.
func RelatesToExperts(name string) bool {
	return expertWord.MatchString(sharedExpert.ReplaceAllString(name, ""))
}

// NamesExpert reports whether a string refers to a routed expert by number, in any form.
func NamesExpert(text string) bool {
	return numberedExpert.MatchString(sharedExpert.ReplaceAllString(text, ""))
}
