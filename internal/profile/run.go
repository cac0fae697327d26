package profile

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/semmoe/operator/internal/checkpoint"
	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/solver/trace"
)

const (
	// attempts bounds how often a request is sent that fails without being refused.
	attempts = 4
	// maxDomains is what the trace's numbers can tell apart.
	maxDomains = 256
)

// Options say what to record.
type Options struct {
	// Endpoint is the base URL of the engine, or of the request router in front of it.
	Endpoint string
	// Adapter speaks the engine's surface.
	Adapter engine.Adapter
	// Report and Config describe the model: what inspection found, and the text of its config.json.
	Report checkpoint.Report
	Config string
	// Items are the requests, in the order of the data set.
	Items []Item
	// Tokens is how many tokens to record at most; requests beyond that are not sent.
	Tokens int
	// RequestTokens cuts longer prompts, NewTokens is how many tokens each request generates (at least 1).
	RequestTokens, NewTokens int
	// Concurrency is how many requests are in flight.
	Concurrency int
	// Wait is how long the engine may take to serve.
	Wait time.Duration
	// Progress is told after each request; it may be nil.
	Progress func(Progress)
}

// Progress is how far a run is.
type Progress struct {
	// Done of Total requests have been answered or refused, with Tokens tokens in Elapsed.
	Done, Total, Tokens int
	Elapsed             time.Duration
}

// Summary tells what was recorded.
type Summary struct {
	Requests int `json:"requests"`
	// Refused requests are those that the engine would not take, too long ones for instance.
	Refused int `json:"refused"`
	Tokens  int `json:"tokens"`
	// DistinctTokens is the number of different token ids, CoverageMilli their share of the vocabulary in thousandths.
	DistinctTokens int `json:"distinctTokens"`
	CoverageMilli  int `json:"coverageMilli"`
	// SkewMilli is the load of a layer's busiest expert over the mean, in thousandths, averaged over layers.
	SkewMilli int     `json:"skewMilli"`
	Seconds   float64 `json:"seconds"`
}

// recorded is one answered request.
type recorded struct {
	tokens  []int32
	experts []uint16
}

// Run sends the requests and returns the trace of those that were answered.
func Run(ctx context.Context, o Options) (*trace.Trace, Summary, error) {
	if o.NewTokens < 1 || o.RequestTokens < 1 || o.Concurrency < 1 || o.Tokens < 1 {
		return nil, Summary{}, fmt.Errorf("tokens %d, request tokens %d, new tokens %d and concurrency %d must all be at least 1", o.Tokens, o.RequestTokens, o.NewTokens, o.Concurrency)
	}
	domains, err := domainsOf(o.Items)
	if err != nil {
		return nil, Summary{}, err
	}
	c := &client{
		base: o.Endpoint, adapter: o.Adapter, layers: o.Report.Layers, top: o.Report.ExpertsPerToken,
		http: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: o.Concurrency}},
	}
	if err := c.waitHealthy(ctx, o.Wait); err != nil {
		return nil, Summary{}, err
	}
	begin := time.Now()
	results, refused, err := sendAll(ctx, c, o, begin)
	if err != nil {
		return nil, Summary{}, err
	}
	t := assemble(o, results, domains)
	summary := summarize(t)
	summary.Refused = refused
	summary.Seconds = time.Since(begin).Seconds()
	return t, summary, nil
}

// sendAll sends the items until the tokens suffice. Which items are recorded is decided by their order alone: the
// answers are looked at in that order, and what is beyond the limit is dropped.
func sendAll(ctx context.Context, c *client, o Options, begin time.Time) ([]*recorded, int, error) {
	results := make([]*recorded, len(o.Items))
	var mu sync.Mutex
	done, tokens, refused := 0, 0, 0
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(o.Concurrency)
	for i, item := range o.Items {
		mu.Lock()
		enough := tokens >= o.Tokens
		mu.Unlock()
		if enough || ctx.Err() != nil {
			break
		}
		group.Go(func() error {
			result, err := c.sendOne(ctx, item, o)
			mu.Lock()
			defer mu.Unlock()
			done++
			var refusal *RefusedError
			switch {
			case errors.As(err, &refusal):
				// One that is refused before any was answered is not the item's fault: the engine lacks something.
				if tokens == 0 {
					return fmt.Errorf("line %d of the data set: %w", item.Line, err)
				}
				refused++
			case err != nil:
				return fmt.Errorf("line %d of the data set: %w", item.Line, err)
			default:
				results[i] = result
				tokens += len(result.tokens)
			}
			if o.Progress != nil {
				o.Progress(Progress{Done: done, Total: len(o.Items), Tokens: tokens, Elapsed: time.Since(begin)})
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return nil, 0, err
	}
	kept := 0
	for i, result := range results {
		if result == nil {
			continue
		}
		if kept >= o.Tokens {
			results[i] = nil
			continue
		}
		kept += len(result.tokens)
	}
	if kept == 0 {
		return nil, 0, errors.New("no request was answered")
	}
	return results, refused, nil
}

// sendOne records one item; what fails without being refused is tried again, each time later.
func (c *client) sendOne(ctx context.Context, item Item, o Options) (*recorded, error) {
	var last error
	for attempt := range attempts {
		if attempt > 0 {
			select {
			case <-ctx.Done():
				return nil, ctx.Err()
			case <-time.After(time.Second << attempt):
			}
		}
		result, err := c.try(ctx, item, o)
		var refusal *RefusedError
		if err == nil || errors.As(err, &refusal) || ctx.Err() != nil {
			return result, err
		}
		last = err
	}
	return nil, fmt.Errorf("failed %d times: %w", attempts, last)
}

func (c *client) try(ctx context.Context, item Item, o Options) (*recorded, error) {
	ids, err := c.tokenize(ctx, item)
	if err != nil {
		return nil, err
	}
	if len(ids) == 0 {
		return nil, &RefusedError{http.StatusOK, "the text has no token"}
	}
	tokens, experts, err := c.record(ctx, ids[:min(len(ids), o.RequestTokens)], o.NewTokens)
	if err != nil {
		return nil, err
	}
	kept, err := moeOnly(experts, o.Report)
	return &recorded{tokens, kept}, err
}

// moeOnly drops the rows of dense layers, whose content is meaningless, and checks the others.
func moeOnly(experts []int32, report checkpoint.Report) ([]uint16, error) {
	row := report.Layers * report.ExpertsPerToken
	kept := make([]uint16, 0, len(experts)/row*len(report.MoELayers)*report.ExpertsPerToken)
	for token := 0; token < len(experts); token += row {
		for _, layer := range report.MoELayers {
			start := token + layer*report.ExpertsPerToken
			for _, expert := range experts[start : start+report.ExpertsPerToken] {
				if expert < 0 || int(expert) >= report.Experts {
					return nil, fmt.Errorf("the engine reports expert %d in layer %d; the model has experts 0 to %d", expert, layer, report.Experts-1)
				}
				kept = append(kept, uint16(expert))
			}
		}
	}
	return kept, nil
}

func domainsOf(items []Item) ([]string, error) {
	names := map[string]bool{}
	for _, item := range items {
		names[item.Domain] = true
	}
	if len(names) > maxDomains {
		return nil, datasetErrorf("the data set has %d domains; at most %d can be told apart", len(names), maxDomains)
	}
	if len(names) == 1 && names[""] {
		return nil, nil
	}
	return slices.Sorted(maps.Keys(names)), nil
}

func assemble(o Options, results []*recorded, domains []string) *trace.Trace {
	t := &trace.Trace{
		Model: trace.Model{
			Type: o.Report.Family, Experts: o.Report.Experts, TopK: o.Report.ExpertsPerToken, Vocabulary: o.Report.Vocab,
			Layers: o.Report.MoELayers, HiddenLayers: o.Report.Layers, HiddenSize: o.Report.Hidden, Config: o.Config, Domains: domains,
		},
		Offsets: []int64{0},
	}
	for i, result := range results {
		if result == nil {
			continue
		}
		t.Tokens = append(t.Tokens, result.tokens...)
		t.Experts = append(t.Experts, result.experts...)
		t.Offsets = append(t.Offsets, int64(len(t.Tokens)))
		t.Documents = append(t.Documents, int32(o.Items[i].Line))
		if domains != nil {
			t.Domains = append(t.Domains, uint8(slices.Index(domains, o.Items[i].Domain)))
		}
	}
	return t
}

func summarize(t *trace.Trace) Summary {
	distinct := map[int32]bool{}
	for _, id := range t.Tokens {
		distinct[id] = true
	}
	layers := len(t.Model.Layers)
	loads := make([]int, layers*t.Model.Experts)
	for position := range t.Tokens {
		for layer := range layers {
			for _, expert := range t.Row(position, layer) {
				loads[layer*t.Model.Experts+int(expert)]++
			}
		}
	}
	skew := 0.0
	for layer := range layers {
		load := loads[layer*t.Model.Experts : (layer+1)*t.Model.Experts]
		mean := float64(len(t.Tokens)*t.Model.TopK) / float64(t.Model.Experts)
		skew += float64(slices.Max(load)) / mean / float64(layers)
	}
	return Summary{
		Requests: t.Requests(), Tokens: len(t.Tokens), DistinctTokens: len(distinct),
		CoverageMilli: 1000 * len(distinct) / t.Model.Vocabulary, SkewMilli: int(1000 * skew),
	}
}
