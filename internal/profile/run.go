// SPDX-License-Identifier: Apache-2.0

package profile

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/internal/profile/counts"
	"github.com/semmoe/operator/solver/trace"
)

const (
	// attempts is the maximum number of times that a failing request is sent. Rejected requests are not sent again.
	attempts = 4
	// refusals is the number of rejected requests before the first completed one after which the run fails: the engine
	// is then at fault, not the requests.
	refusals = 8
	// requestTimeout bounds the duration of a request, because an engine may hang.
	requestTimeout = 10 * time.Minute
)

// Options configure a run.
type Options struct {
	// Endpoint is the base URL of the engine, or of the request router in front of it.
	Endpoint string
	// Dedicated is true if the engine only serves this run. If it dies or fails a request repeatedly, another attempt
	// would fail in the same way.
	Dedicated bool
	// Adapter implements the routes of the engine.
	Adapter engine.Adapter
	// Report and Config describe the model: the report of the inspection, and the text of config.json.
	Report checkpoint.Report
	Config string
	// Items are the requests, in the order of the data set. They are sent in a random order that Seed determines, so
	// that the requests that fit into Tokens are also a uniform sample.
	Items []Item
	Seed  uint64
	// Tokens is the maximum number of tokens to record. The last request may exceed it, and further requests are not
	// sent.
	Tokens int
	// TraceTokens is the maximum number of tokens in the routing trace.
	TraceTokens int
	// RequestTokens is the maximum number of tokens of a prompt; longer prompts are truncated. NewTokens is the number
	// of tokens that each request generates (at least 1). An item of the model's own text has RequestTokens in total.
	RequestTokens, NewTokens int
	// Concurrency is the number of concurrent requests.
	Concurrency int
	// Wait is the maximum time until the engine serves.
	Wait time.Duration
	// Progress is called at the start of each phase and after each request. It may be nil.
	Progress func(Progress)
}

func (o *Options) validate() error {
	if o.NewTokens < 1 || o.RequestTokens < 1 || o.Concurrency < 1 || o.Tokens < 1 {
		return fmt.Errorf("tokens %d, request tokens %d, new tokens %d and concurrency %d must all be at least 1", o.Tokens, o.RequestTokens, o.NewTokens, o.Concurrency)
	}
	if longest := o.RequestTokens + o.NewTokens; o.TraceTokens < longest {
		return fmt.Errorf("trace tokens %d must be at least request tokens plus new tokens, %d: only complete requests are traced", o.TraceTokens, longest)
	}
	return nil
}

func (o *Options) report(p Progress) {
	if o.Progress != nil {
		p.Total, p.TokensTotal = len(o.Items), o.Tokens
		o.Progress(p)
	}
}

// Summary describes the recorded profile.
type Summary struct {
	// Requests is the number of requests in the routing trace.
	Requests int `json:"requests"`
	// Refused is the number of requests that the engine rejected, for example because they are too long.
	Refused int `json:"refused"`
	// Tokens is the number of counted tokens, and TracedTokens is the number of them in the routing trace.
	Tokens       int `json:"tokens"`
	TracedTokens int `json:"tracedTokens"`
	// DistinctTokens is the number of different token IDs, and CoverageMilli is their share of the vocabulary in
	// thousandths.
	DistinctTokens int `json:"distinctTokens"`
	CoverageMilli  int `json:"coverageMilli"`
	// SkewMilli is the load of the busiest expert of a layer divided by the mean load, in thousandths, averaged over
	// layers.
	SkewMilli int `json:"skewMilli"`
	// Seconds is the duration of the run. It is not stored.
	Seconds float64 `json:"seconds,omitempty"`
}

// Profile is a recorded profile.
type Profile struct {
	// Trace contains a sample of complete requests.
	Trace   *trace.Trace
	Summary Summary
	// counts are the counts over all tokens.
	counts *counts.Counts
}

// CreateCounts writes the counts over all tokens to a file. The file is replaced atomically.
func (p *Profile) CreateCounts(path string) error { return p.counts.Create(path) }

// countedModel returns the model of the counts.
func countedModel(report checkpoint.Report) counts.Model {
	return counts.Model{
		Digest: report.ModelDigest, MoELayers: report.MoELayers,
		Experts: report.Experts, ExpertsPerToken: report.ExpertsPerToken, Vocabulary: report.Vocab,
	}
}

// Run sends the requests and returns the profile of the completed ones. It returns an *EngineError if another attempt
// would fail in the same way.
func Run(ctx context.Context, o Options) (*Profile, error) {
	if err := o.validate(); err != nil {
		return nil, err
	}
	c := &client{
		base: o.Endpoint, adapter: o.Adapter, layers: o.Report.Layers, top: o.Report.ExpertsPerToken,
		http: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: o.Concurrency}, Timeout: requestTimeout},
	}
	o.report(Progress{Phase: WaitingForEngine})
	if err := c.waitHealthy(ctx, o.Wait); err != nil {
		if o.Dedicated && ctx.Err() == nil {
			return nil, &EngineError{err.Error()}
		}
		return nil, err
	}
	begin := time.Now()
	o.report(Progress{Phase: Recording})
	counted, traced := counts.New(countedModel(o.Report)), newReservoir(o.TraceTokens, o.Seed)
	refused, err := sendAll(ctx, c, o, func(result *recorded) (tokens int) {
		counted.Add(result.tokens, result.experts)
		traced.add(result)
		return int(counted.Tokens())
	})
	if err != nil {
		return nil, err
	}
	return profileOf(o, counted, traced, refused, begin)
}

// profileOf returns the profile of the counted tokens, and of the requests that the reservoir kept.
func profileOf(o Options, counted *counts.Counts, traced *reservoir, refused int, begin time.Time) (*Profile, error) {
	t := assemble(o, traced.requests(), domainsOf(o.Items))
	if err := t.Validate(); err != nil {
		return nil, &EngineError{fmt.Sprintf("the responses of the engine are invalid: %v", err)}
	}
	return &Profile{t, Summary{
		Requests: t.Requests(), Refused: refused, Tokens: int(counted.Tokens()), TracedTokens: len(t.Tokens),
		DistinctTokens: counted.Distinct(), CoverageMilli: 1000 * counted.Distinct() / o.Report.Vocab,
		SkewMilli: int(1000 * counted.Skew()), Seconds: time.Since(begin).Seconds(),
	}, counted}, nil
}

// outcome is the result of one request.
type outcome struct {
	item   int
	result *recorded
	err    error
}

// sendAll sends the items, calls consume with the results until the tokens suffice, and returns the number of rejected
// requests. Results are consumed in the order in which the items were sent, so that the profile does not depend on the
// speed of the engine. At most 2 x Concurrency results wait for an earlier one.
func sendAll(ctx context.Context, c *client, o Options, consume func(*recorded) (tokens int)) (refused int, err error) {
	ctx, stop := context.WithCancel(ctx)
	var group errgroup.Group
	group.SetLimit(o.Concurrency)
	queue := make(chan chan outcome, o.Concurrency)
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		defer close(queue)
		for _, item := range sendOrder(o) {
			future := make(chan outcome, 1)
			select {
			case queue <- future:
			case <-ctx.Done():
				return
			}
			group.Go(func() error {
				result, err := c.sendOne(ctx, o.Items[item], o)
				future <- outcome{item, result, err}
				return nil
			})
		}
	}()
	defer func() {
		stop()
		<-sent
		_ = group.Wait() // the functions return no error
	}()

	begin, done, tokens := time.Now(), 0, 0
	for future := range queue {
		end := <-future
		var refusal *RefusedError
		switch {
		case errors.As(end.err, &refusal) && refusal.Message == noExperts && tokens > 0 && !o.Dedicated:
			// The earlier responses may be from another model or engine. Another attempt uses only one of the two.
			return 0, fmt.Errorf("%s: %w, but earlier responses do: another model or engine serves now", o.Items[end.item].name(), end.err)
		case errors.As(end.err, &refusal):
			refused++
			if tokens == 0 && (refused >= refusals || refused == len(o.Items)) {
				return 0, &EngineError{fmt.Sprintf("%s, and all before it: %v", o.Items[end.item].name(), end.err)}
			}
		case end.err != nil:
			return 0, fmt.Errorf("%s: %w", o.Items[end.item].name(), end.err)
		default:
			end.result.item = end.item
			tokens = consume(end.result)
		}
		done++
		o.report(Progress{Phase: Recording, Done: done, Tokens: tokens, Elapsed: time.Since(begin)})
		if tokens >= o.Tokens {
			break
		}
	}
	if tokens == 0 { // without tokens, the context ended before any request was completed
		return 0, errors.Join(errors.New("no request was completed"), ctx.Err())
	}
	return refused, ctx.Err()
}

// sendOrder returns the random order, which Seed determines, in which the items are sent.
func sendOrder(o Options) []int { return rand.New(rand.NewPCG(o.Seed, 0x73656e64)).Perm(len(o.Items)) }

// sendOne records one item. It retries failures except rejections, with exponential back-off.
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
		var broken *EngineError
		if err == nil || errors.As(err, &refusal) || errors.As(err, &broken) || ctx.Err() != nil {
			return result, err
		}
		if o.Dedicated && errors.Is(err, syscall.ECONNREFUSED) {
			return nil, &EngineError{fmt.Sprintf("the engine at %s died: it accepts no more connections", c.base)}
		}
		last = err
	}
	if o.Dedicated {
		return nil, &EngineError{fmt.Sprintf("failed %d times: %v", attempts, last)}
	}
	return nil, fmt.Errorf("failed %d times: %w", attempts, last)
}

func (c *client) try(ctx context.Context, item Item, o Options) (*recorded, error) {
	tokens, experts, err := c.recordItem(ctx, item, o)
	if err != nil {
		return nil, err
	}
	if err := checkTokens(tokens, o.Report); err != nil {
		return nil, err
	}
	kept, err := moeOnly(experts, o.Report)
	return &recorded{tokens: tokens, experts: kept}, err
}

func (c *client) recordItem(ctx context.Context, item Item, o Options) (tokens, experts []int32, err error) {
	if item.Own {
		return c.record(ctx, []int32{item.Start}, max(1, o.RequestTokens-1), 1, item.Seed)
	}
	ids, err := c.tokenize(ctx, item)
	if err != nil {
		return nil, nil, err
	}
	if len(ids) == 0 {
		return nil, nil, &RefusedError{http.StatusOK, "the text contains no tokens"}
	}
	return c.record(ctx, ids[:min(len(ids), o.RequestTokens)], o.NewTokens, 0, 0)
}

func checkTokens(tokens []int32, report checkpoint.Report) error {
	for _, token := range tokens {
		if token < 0 || int(token) >= report.Vocab {
			return &EngineError{fmt.Sprintf("the engine returned token ID %d: the vocabulary of the model has IDs 0 to %d", token, report.Vocab-1)}
		}
	}
	return nil
}

// moeOnly removes the rows of dense layers, whose content is undefined, and validates the others.
func moeOnly(experts []int32, report checkpoint.Report) ([]uint16, error) {
	row := report.Layers * report.ExpertsPerToken
	kept := make([]uint16, 0, len(experts)/row*len(report.MoELayers)*report.ExpertsPerToken)
	for token := 0; token < len(experts); token += row {
		for _, layer := range report.MoELayers {
			start, begin := token+layer*report.ExpertsPerToken, len(kept)
			for _, expert := range experts[start : start+report.ExpertsPerToken] {
				if expert < 0 || int(expert) >= report.Experts {
					return nil, &EngineError{fmt.Sprintf("the engine returned expert %d in layer %d: the model has experts 0 to %d", expert, layer, report.Experts-1)}
				}
				if slices.Contains(kept[begin:], uint16(expert)) {
					return nil, &EngineError{fmt.Sprintf("the engine returned expert %d twice for token %d in layer %d: the experts of a token must differ", expert, token/row, layer)}
				}
				kept = append(kept, uint16(expert))
			}
		}
	}
	return kept, nil
}

// domainsOf returns the domains of the items, sorted by name; nil if no item has a domain.
func domainsOf(items []Item) []string {
	names := map[string]bool{}
	for _, item := range items {
		names[item.Domain] = true
	}
	if len(names) == 1 && names[""] {
		return nil
	}
	return slices.Sorted(maps.Keys(names))
}

func assemble(o Options, requests []*recorded, domains []string) *trace.Trace {
	t := &trace.Trace{
		Model: trace.Model{
			Type: o.Report.Family, Experts: o.Report.Experts, TopK: o.Report.ExpertsPerToken, Vocabulary: o.Report.Vocab,
			Layers: o.Report.MoELayers, HiddenLayers: o.Report.Layers, HiddenSize: o.Report.Hidden, Config: o.Config, Digest: o.Report.ModelDigest, Domains: domains,
		},
		Offsets: []int64{0},
	}
	tokens, width := 0, len(o.Report.MoELayers)*o.Report.ExpertsPerToken
	for _, request := range requests {
		tokens += len(request.tokens)
	}
	t.Tokens, t.Experts = make([]int32, 0, tokens), make([]uint16, 0, tokens*width)
	for _, request := range requests {
		t.Tokens = append(t.Tokens, request.tokens...)
		t.Experts = append(t.Experts, request.experts...)
		t.Offsets = append(t.Offsets, int64(len(t.Tokens)))
		t.Documents = append(t.Documents, int32(o.Items[request.item].Line))
		if domains != nil {
			t.Domains = append(t.Domains, uint8(slices.Index(domains, o.Items[request.item].Domain)))
		}
	}
	return t
}
