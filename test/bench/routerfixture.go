// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/internal/plan/bundle"
	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/test/corpus"
)

// Sizes of the router's inputs: the vocabulary of a large model, one plan, and many pods.
const (
	routerVocabulary = 151_000
	routerRanks      = 64
	routerPods       = 500
	promptTokens     = 1_000
	longPromptTokens = 100_000
)

// routerFixture describes the contents of a router's snapshot directory.
type routerFixture struct {
	// plan is the name of the plan in responses.
	plan  string
	table *affinity.RankTable
	words []string
}

// newRouterFixture returns a plan for a model with a vocabulary of realistic size, and the tokenizer of the model.
func newRouterFixture() (*routerFixture, *plan.Artifact, []byte, error) {
	words := usualWords()
	tokenizer, err := wordTokenizer(words)
	if err != nil {
		return nil, nil, nil, err
	}
	p := routerPlan(routerRanks)
	artifact, err := plan.Encode(p)
	if err != nil {
		return nil, nil, nil, err
	}
	return &routerFixture{plan: artifact.Digest[:16], table: p.Ranks, words: words}, artifact, tokenizer, nil
}

// podAddress returns the loopback address of a pod. The same engine serves all of them.
func podAddress(pod int) string { return fmt.Sprintf("127.0.%d.%d", 1+pod/250, 1+pod%250) }

// writeSnapshot creates a snapshot directory from which a router starts with some pods, which name the plan of a digest
// or none.
func writeSnapshot(dir string, a *plan.Artifact, tokenizer []byte, port string, pods, ranks int, digest string) error {
	directory := filepath.Join(dir, "plans", a.Digest)
	if err := plan.Write(directory, a, []byte("{}")); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(directory, bundle.TokenizerFile), tokenizer, 0o644); err != nil {
		return err
	}
	backends := make([]discovery.Backend, pods)
	for i := range backends {
		backends[i] = discovery.Backend{
			Pod: fmt.Sprintf("engine-%d", i), Address: net.JoinHostPort(podAddress(i), port),
			Ranks: ranks, Revision: "bench", PlanDigest: digest,
		}
	}
	return discovery.SaveSnapshot(dir, backends)
}

// routerPlan returns a plan with random scores. The cost of the router does not depend on their values.
func routerPlan(ranks int) *solver.Plan {
	const experts = 128
	random := rand.New(rand.NewPCG(1, 4))
	scores := make([]uint16, routerVocabulary*ranks)
	for i := range scores {
		scores[i] = uint16(random.IntN(affinity.ScoreScale / 8))
	}
	return &solver.Plan{
		Attention: placement.DataParallel, Forecast: solver.Table, Algorithm: placement.Auto,
		HiddenLayers: 1, Vocabulary: routerVocabulary, TrainPercent: 80, Seed: 1,
		Placement: &placement.Placement{
			Ranks: ranks, Experts: experts, SlotsPerRank: experts / ranks,
			Layers: []placement.Layer{{Layer: 0, Slots: indices(experts)}},
		},
		Ranks: &affinity.RankTable{Ranks: ranks, Score: scores},
	}
}

// usualWords returns the words of the corpus, most frequent first.
func usualWords() []string {
	count := map[string]int{}
	for _, document := range corpus.Written() {
		for _, word := range strings.FieldsFunc(document.Text, func(r rune) bool { return (r|0x20) < 'a' || (r|0x20) > 'z' }) {
			count[word]++
		}
	}
	return slices.SortedFunc(maps.Keys(count), func(a, b string) int { return cmp.Or(count[b]-count[a], cmp.Compare(a, b)) })
}

// wordTokenizer returns a tokenizer.json. Its tokens are all prefixes of " word", for the given words and for
// generated words up to the size of the vocabulary. As in the vocabularies of large models, a frequent word is one
// token.
func wordTokenizer(words []string) ([]byte, error) {
	base, err := os.ReadFile(filepath.Join(checkpoint, "tokenizer.json"))
	if err != nil {
		return nil, err
	}
	var file map[string]any
	if err := json.Unmarshal(base, &file); err != nil {
		return nil, err
	}
	model := file["model"].(map[string]any)
	vocabulary := map[string]int{"<|endoftext|>": 0}
	for token := range model["vocab"].(map[string]any) {
		if len([]rune(token)) == 1 {
			vocabulary[token] = len(vocabulary)
		}
	}
	var merges []string
	enter := func(word string) {
		for i := range word {
			before, after := "Ġ"+word[:i], "Ġ"+word[:i+1]
			if _, known := vocabulary[after]; !known && len(vocabulary) < routerVocabulary {
				vocabulary[after] = len(vocabulary)
				merges = append(merges, before+" "+word[i:i+1])
			}
		}
	}
	for _, word := range words {
		enter(word)
	}
	for random := rand.New(rand.NewPCG(1, 5)); len(vocabulary) < routerVocabulary; {
		word := make([]byte, 3+random.IntN(8))
		for i := range word {
			word[i] = byte('a' + random.IntN(26))
		}
		enter(string(word))
	}
	model["vocab"], model["merges"] = vocabulary, merges
	return json.Marshal(file)
}

// prompt returns a prompt of frequent words, drawn by Zipf's law, with one token per word.
func (f *routerFixture) prompt(random *rand.Rand, tokens int) string {
	zipf := rand.NewZipf(random, 1.1, 4, uint64(len(f.words)-1))
	var text strings.Builder
	for range tokens {
		text.WriteByte(' ')
		text.WriteString(f.words[zipf.Uint64()])
	}
	return text.String()
}

// bodies returns the bodies of n completion requests with different prompts.
func (f *routerFixture) bodies(seed uint64, n, tokens int) [][]byte {
	random := rand.New(rand.NewPCG(seed, 6))
	all := make([][]byte, n)
	for i := range all {
		all[i] = []byte(`{"model":"bench","prompt":` + strconv.Quote(f.prompt(random, tokens)) + `,"max_tokens":16,"temperature":0}`)
	}
	return all
}
