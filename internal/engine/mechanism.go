// SPDX-License-Identifier: Apache-2.0

package engine

import "strings"

// Kind is the kind of a mechanism of an engine.
type Kind string

// The kinds of mechanisms.
const (
	FlagKind     Kind = "flag"
	VariableKind Kind = "variable"
	RouteKind    Kind = "route"
	HeaderKind   Kind = "header"
	MemberKind   Kind = "member"
	MetricKind   Kind = "metric"
	ValueKind    Kind = "value"
	// DraftKind is a method of speculative decoding with draft layers that may have experts. Source describes the order
	// in which these experts are loaded.
	DraftKind Kind = "draft"
)

// Evidence is the way in which a mechanism was verified.
type Evidence string

const (
	// Read means that the source was read.
	Read Evidence = "read"
	// Run means that the engine was also run.
	Run Evidence = "run"
)

// Mechanism is a part of an engine's interface that the operator or the request router uses, sets, refuses or knows.
type Mechanism struct {
	Kind Kind
	// Names are the spellings.
	Names []string
	// First and Last are the first and the last checked release with the mechanism. An empty Last means the adapter's
	// Newest.
	First, Last Release
	// Source is a file of the engine's project, with a pull request or an issue if one explains the mechanism.
	Source string
	// Evidence is Read or Run.
	Evidence Evidence
}

// NewMechanisms returns mechanisms of one kind with the same releases, source and evidence, one for each text. A text
// contains the spellings of a mechanism, separated by spaces.
func NewMechanisms(kind Kind, first, last Release, source string, evidence Evidence, texts ...string) []Mechanism {
	var all []Mechanism
	for _, text := range texts {
		all = append(all, Mechanism{Kind: kind, Names: strings.Fields(text), First: first, Last: last, Source: source, Evidence: evidence})
	}
	return all
}
