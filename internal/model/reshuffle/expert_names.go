// SPDX-License-Identifier: Apache-2.0

package reshuffle

import (
	"bytes"
	"context"
	"encoding/json"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/solver/modelconfig"
)

// jsonString matches the string literals of a JSON text. Outside of string literals, JSON contains no quotes.
var jsonString = regexp.MustCompile(`"(?:[^"\\]|\\.)*"`)

// expertRenamer rewrites expert names in the configuration files of a checkpoint.
type expertRenamer struct {
	c *checkpoint.Checkpoint
	m *mapping
	// checked contains the entries that need no change. experts is created for the first entry that must be compared.
	checked map[string]bool
	experts *expertNames
}

func newExpertRenamer(c *checkpoint.Checkpoint, m *mapping) *expertRenamer {
	return &expertRenamer{c: c, m: m, checked: map[string]bool{}}
}

// rename rewrites the names of experts in a configuration file, such as the ignore lists of quantisation. All other
// bytes stay unchanged. It refuses a text that distinguishes experts in a way that cannot be rewritten.
func (n *expertRenamer) rename(ctx context.Context, text []byte) ([]byte, error) {
	strict := modelconfig.Strict(text)
	if !json.Valid(strict) {
		return nil, checkpoint.Invalidf("not valid JSON")
	}
	if len(n.m.toNew) == 0 {
		return text, nil
	}
	if err := n.m.config.CheckEntries(strict); err != nil {
		return nil, err
	}
	var failed error
	neutral, place := neutralStrings(strict, n.m.config.Experts), -1
	out := jsonString.ReplaceAllFunc(text, func(literal []byte) []byte {
		place++
		var entry string
		if err := json.Unmarshal(literal, &entry); err != nil || failed != nil {
			return literal
		}
		part := n.m.config.Classify(entry)
		switch {
		case part.Role == checkpoint.Expert && n.m.toNew[part.Layer] == nil:
			return literal
		case part.Role == checkpoint.Expert:
			if failed = checkUnambiguous(part, entry, n.m.config.Experts); failed != nil {
				return literal
			}
			return quote(n.m.newName(entry))
		case part.Role == checkpoint.Gate || part.Role == checkpoint.Shared || n.checked[entry] || neutral[place]:
		case part.Role == checkpoint.Unrecognised && n.m.toNew[part.Layer] != nil && strings.ContainsAny(part.Name, "0123456789"):
			failed = checkpoint.Invalidf("%.200q may depend on the order of the experts, and cannot be rewritten", entry)
		case mayDistinguishExperts(entry):
			n.checked[entry] = true
			failed = n.checkNeutral(ctx, entry)
		}
		return literal
	})
	return out, failed
}

// expertOfAny matches the path of an expert, or of a module in an expert, in any layer. The groups are the prefix, the
// expert number and the suffix.
var expertOfAny = regexp.MustCompile(`^([\w.]*\bexperts\.)(0|[1-9]\d*)((?:\.[A-Za-z_]\w*)*)$`)

// neutralStrings finds the strings of a JSON text that need no check. It returns their indices among all strings of the
// text. The text must be valid JSON.
//
// Array entries that differ only in the expert number and together name every expert, such as "mlp.experts.0.up_proj"
// to "mlp.experts.59.up_proj", have the same meaning in any order of the experts, regardless of how an engine
// interprets them. Members such as _name_or_path are not about experts.
func neutralStrings(text []byte, experts int) map[int]bool {
	neutral, place := map[int]bool{}, -1
	var open []container // the enclosing containers, outermost first
	for decoder := json.NewDecoder(bytes.NewReader(text)); ; {
		token, err := decoder.Token()
		if err != nil {
			return neutral // end of text
		}
		inner := len(open) - 1
		switch token := token.(type) {
		case json.Delim:
			switch token {
			case '[', '{':
				next := container{neutral: inner >= 0 && open[inner].neutral || inner >= 0 && open[inner].value && modelconfig.NeutralMember(open[inner].key)}
				if token == '[' {
					next.names = siblingNames{}
				}
				open = append(open, next)
				continue
			}
			open[inner].names.addComplete(experts, neutral)
			open = open[:inner]
		case string:
			place++
			if inner < 0 {
				continue
			}
			around := &open[inner]
			if around.names != nil {
				around.names.add(token, place, experts)
			}
			if around.neutral || around.value && modelconfig.NeutralMember(around.key) {
				neutral[place] = true
			}
			if around.names == nil && !around.value {
				around.key, around.value = token, true
				continue
			}
		}
		if n := len(open) - 1; n >= 0 {
			open[n].value = false
		}
	}
}

// container is an array or an object that encloses the current JSON token.
type container struct {
	// names contains the entries of an array. It is nil for an object.
	names siblingNames
	// key is the current member of an object. value reports that the value of this member is next.
	key   string
	value bool
	// neutral reports that nothing in the container is about experts.
	neutral bool
}

// siblingNames groups the entries of an array that differ only in the expert number. It maps prefix and suffix of the
// entry to the expert number, and the expert number to the indices of its entries.
type siblingNames map[[2]string]map[int][]int

func (l siblingNames) add(entry string, place, experts int) {
	parts := expertOfAny.FindStringSubmatch(entry)
	if parts == nil {
		return
	}
	expert, err := strconv.Atoi(parts[2])
	if err != nil || expert >= experts {
		return
	}
	around := [2]string{parts[1], parts[3]}
	if l[around] == nil {
		l[around] = map[int][]int{}
	}
	l[around][expert] = append(l[around][expert], place)
}

// addComplete adds the indices of the groups that name every expert.
func (l siblingNames) addComplete(experts int, places map[int]bool) {
	for _, named := range l {
		if len(named) < experts {
			continue
		}
		for _, list := range named {
			for _, place := range list {
				places[place] = true
			}
		}
	}
}

// checkUnambiguous refuses a name that ends in an expert number which is a prefix of another expert's number. Engines
// disagree whether such an entry matches one expert or, as a prefix, several.
func checkUnambiguous(part checkpoint.Part, entry string, experts int) error {
	if part.Name == "" && part.Expert > 0 && part.Expert*10 < experts {
		return checkpoint.Invalidf("%q may match only expert %d or also expert %d: add the module's name to the entry", entry, part.Expert, part.Expert*10)
	}
	return nil
}

// mayDistinguishExperts is a cheap test whether an entry may be a pattern or a part of a name that distinguishes
// experts.
func mayDistinguishExperts(entry string) bool {
	return strings.Contains(entry, "expert") || modelconfig.NamesExpert(entry) || strings.ContainsAny(entry, "0123456789") && strings.ContainsAny(entry, `\*[]()?+^$|`) || strings.Contains(entry, `\d`)
}

// checkNeutral requires that an entry needs no change: for every tensor and module of an expert, and for every
// interpretation that engines use, the entry must match the new name if and only if it matches the old name. An entry
// that contains an expert number and matches no name is refused.
func (n *expertRenamer) checkNeutral(ctx context.Context, entry string) error {
	if n.experts == nil {
		n.experts = newExpertNames(n.c, n.m)
	}
	numbered := modelconfig.NamesExpert(entry)
	if !numbered && n.experts.isAnyAbsent(requiredWords(entry)) {
		return nil
	}
	matches, err := interpretations(entry)
	if err != nil {
		return err
	}
	matched, known := make([]bool, len(n.experts.all)), false
	for _, match := range matches {
		if err := ctx.Err(); err != nil {
			return err
		}
		for i, name := range n.experts.all {
			matched[i] = match(name)
			known = known || matched[i]
		}
		for _, move := range n.experts.moves {
			if matched[move.from] != matched[move.to] {
				return checkpoint.Invalidf("%q matches only one of %s and %s, which are exchanged, and cannot be rewritten: list full module names instead", entry, n.experts.all[move.from], n.experts.all[move.to])
			}
		}
	}
	if numbered && !known && !n.namesNonexistentExpert(entry) && !n.matchesUnmoved(matches) {
		return checkpoint.Invalidf("%.200q names an expert in an unknown form, and cannot be rewritten", entry)
	}
	return nil
}

// namesNonexistentExpert reports whether an entry has the form of an expert's name with a number that no expert has.
func (n *expertRenamer) namesNonexistentExpert(entry string) bool {
	parts := expertOfAny.FindStringSubmatch(entry)
	if parts == nil {
		return false
	}
	expert, err := strconv.Atoi(parts[2])
	return err != nil || expert >= n.m.config.Experts
}

// matchesUnmoved reports whether an entry matches an expert, or a module in an expert, of an unchanged layer.
func (n *expertRenamer) matchesUnmoved(matches []func(string) bool) bool {
	for _, shard := range n.c.Shards {
		for name := range shard.Tensors {
			part := n.m.config.Classify(name)
			if part.Role != checkpoint.Expert || n.m.toNew[part.Layer] != nil {
				continue
			}
			for modules := strings.Count(part.Name, ".") + 1; modules >= 0; modules-- {
				if slices.ContainsFunc(matches, func(match func(string) bool) bool { return match(name) }) {
					return true
				}
				name = parent(name)
			}
		}
	}
	return false
}

// expertNames contains the names of expert tensors and modules in the layers that change.
type expertNames struct {
	all []string
	// moves lists the renamed names as indices in all.
	moves []struct{ from, to int }
	// first contains the tensor names with expert 0 in place of any other. A string without digits occurs in a name if
	// and only if it occurs in one of these.
	first map[string]bool
}

func newExpertNames(c *checkpoint.Checkpoint, m *mapping) *expertNames {
	names := &expertNames{first: map[string]bool{}}
	places := map[string]int{}
	place := func(name string) int {
		at, known := places[name]
		if !known {
			at = len(names.all)
			places[name], names.all = at, append(names.all, name)
		}
		return at
	}
	visited := map[string]bool{}
	for _, shard := range c.Shards {
		for old := range shard.Tensors {
			part := m.config.Classify(old)
			if part.Role != checkpoint.Expert || m.toNew[part.Layer] == nil {
				continue
			}
			names.first[part.ExpertName(0)] = true
			// Add the tensor, its module, and so on up to the expert. Tensors of a module share the parents.
			new := m.newName(old)
			for modules := strings.Count(part.Name, ".") + 1; modules >= 0 && !visited[old]; modules-- {
				visited[old] = true
				names.moves = append(names.moves, struct{ from, to int }{place(old), place(new)})
				old, new = parent(old), parent(new)
			}
		}
	}
	return names
}

// isAnyAbsent reports whether at least one of the words occurs in no name. The words must not contain digits.
func (n *expertNames) isAnyAbsent(words []string) bool {
	return slices.ContainsFunc(words, func(word string) bool {
		for name := range n.first {
			if strings.Contains(name, word) {
				return false
			}
		}
		return true
	})
}

var word = regexp.MustCompile(`[A-Za-z_]+`)

// requiredWords returns words that occur in every name that an entry matches in any interpretation. Most entries are
// about other modules and can be ruled out by these words without comparing every expert.
func requiredWords(entry string) []string {
	pattern, _ := cutPrefixes(entry)
	if strings.Contains(pattern, "|") {
		return nil
	}
	if special := strings.IndexAny(pattern, `\[](){}^$`); special >= 0 {
		pattern = pattern[:special]
	}
	var words []string
	for _, piece := range strings.FieldsFunc(pattern, func(c rune) bool { return strings.ContainsRune("*?+", c) }) {
		// The following operator may make the last letter optional.
		words = append(words, word.FindAllString(piece[:len(piece)-1], -1)...)
	}
	return words
}

func parent(name string) string { return name[:max(strings.LastIndexByte(name, '.'), 0)] }

// interpretations returns the ways in which engines interpret an entry: as a part or the end of a name, as a shell
// pattern, and as a regular expression with the prefixes that some formats use.
func interpretations(entry string) ([]func(string) bool, error) {
	out := []func(string) bool{
		func(name string) bool { return strings.Contains(name, entry) },
		func(name string) bool { return strings.HasSuffix(name, entry) },
	}
	pattern, marked := cutPrefixes(entry)
	if !strings.ContainsAny(pattern, `\*[]()?+^$|.`) {
		return out, nil
	}
	out = append(out, func(name string) bool { matched, err := path.Match(pattern, name); return err == nil && matched })
	for _, form := range []string{"%s", "^(?:%s)", "^(?:%s)$"} {
		expression, err := regexp.Compile(strings.Replace(form, "%s", pattern, 1))
		if err == nil {
			out = append(out, expression.MatchString)
		} else if marked || strings.Contains(pattern, "(?") {
			return nil, checkpoint.Invalidf("%q: failed to parse it as a regular expression of expert names: %v", entry, err)
		}
	}
	return out, nil
}

// cutPrefixes removes the prefixes that some formats put in front of a regular expression.
func cutPrefixes(entry string) (pattern string, marked bool) {
	pattern = entry
	for _, mark := range []string{"re:", "-:", "+:"} {
		if rest, ok := strings.CutPrefix(pattern, mark); ok {
			pattern, marked = rest, true
		}
	}
	return pattern, marked
}

// quote encodes a JSON string.
func quote(text string) []byte {
	var out bytes.Buffer
	encoder := json.NewEncoder(&out)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(text); err != nil {
		return []byte(strconv.Quote(text))
	}
	return bytes.TrimSuffix(out.Bytes(), []byte("\n"))
}
