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

	"github.com/semmoe/operator/internal/checkpoint"
	"github.com/semmoe/operator/internal/counts"
	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/solver/trace"
)

const (
	// attempts bounds how often a request is sent that fails without being refused.
	attempts = 4
	// refusals is how many requests may be refused before the first one is answered: more are not the requests' fault.
	refusals = 8
	// answerLimit bounds how long a request may take: an engine that hangs is not waited for.
	answerLimit = 10 * time.Minute
)

// Options say what to record.
type Options struct {
	// Endpoint is the base URL of the engine, or of the request router in front of it.
	Endpoint string
	// Dedicated says that the engine lives for this run alone: when it dies, or fails a request again and again, so it will
	// in every other attempt.
	Dedicated bool
	// Adapter speaks the engine's surface.
	Adapter engine.Adapter
	// Report and Config describe the model: what inspection found, and the text of its config.json.
	Report checkpoint.Report
	Config string
	// Items are the requests, in the order of the data set. They are sent in an order that Seed decides, so that those that
	// fit into Tokens are a uniform sample as well.
	Items []Item
	Seed  uint64
	// Tokens is how many tokens to record at most, but for the last request; requests beyond that are not sent.
	Tokens int
	// TraceTokens is how many of them the routing trace holds at most.
	TraceTokens int
	// RequestTokens cuts longer prompts, NewTokens is how many tokens each request generates (at least 1).
	RequestTokens, NewTokens int
	// Concurrency is how many requests are in flight.
	Concurrency int
	// Wait is how long the engine may take to serve.
	Wait time.Duration
	// Progress is told when a phase begins and after each request; it may be nil.
	Progress func(Progress)
}

func (o *Options) validate() error {
	if o.NewTokens < 1 || o.RequestTokens < 1 || o.Concurrency < 1 || o.Tokens < 1 {
		return fmt.Errorf("tokens %d, request tokens %d, new tokens %d and concurrency %d must all be at least 1", o.Tokens, o.RequestTokens, o.NewTokens, o.Concurrency)
	}
	if longest := o.RequestTokens + o.NewTokens; o.TraceTokens < longest {
		return fmt.Errorf("trace tokens %d must be at least request tokens plus new tokens, %d: requests are traced whole", o.TraceTokens, longest)
	}
	return nil
}

func (o *Options) tell(p Progress) {
	if o.Progress != nil {
		p.Total, p.TokensTotal = len(o.Items), o.Tokens
		o.Progress(p)
	}
}

// Summary tells what was recorded.
type Summary struct {
	// Requests is how many requests the routing trace holds.
	Requests int `json:"requests"`
	// Refused requests are those that the engine would not take, too long ones for instance.
	Refused int `json:"refused"`
	// Tokens were counted; TracedTokens of them are in the routing trace.
	Tokens       int `json:"tokens"`
	TracedTokens int `json:"tracedTokens"`
	// DistinctTokens is the number of different token ids, CoverageMilli their share of the vocabulary in thousandths.
	DistinctTokens int `json:"distinctTokens"`
	CoverageMilli  int `json:"coverageMilli"`
	// SkewMilli is the load of a layer's busiest expert over the mean, in thousandths, averaged over layers.
	SkewMilli int `json:"skewMilli"`
	// Seconds is how long it took; it is not stored.
	Seconds float64 `json:"seconds,omitempty"`
}

// Profile is what was recorded.
type Profile struct {
	// Trace holds a sample of whole requests.
	Trace   *trace.Trace
	Summary Summary
	// counts are over all tokens.
	counts *counts.Counts
}

// CreateCounts writes the counts over all tokens to a file, which appears complete or not at all.
func (p *Profile) CreateCounts(path string) error { return p.counts.Create(path) }

// countedModel is what counts must know of the model.
func countedModel(report checkpoint.Report) counts.Model {
	return counts.Model{
		Digest: report.ModelDigest, MoELayers: report.MoELayers,
		Experts: report.Experts, ExpertsPerToken: report.ExpertsPerToken, Vocabulary: report.Vocab,
	}
}

// Run sends the requests and returns what was recorded of those that were answered. An *EngineError says that another
// attempt would end in the same way.
func Run(ctx context.Context, o Options) (*Profile, error) {
	if err := o.validate(); err != nil {
		return nil, err
	}
	domains := domainsOf(o.Items)
	c := &client{
		base: o.Endpoint, adapter: o.Adapter, layers: o.Report.Layers, top: o.Report.ExpertsPerToken,
		http: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: o.Concurrency}, Timeout: answerLimit},
	}
	o.tell(Progress{Phase: WaitingForEngine})
	if err := c.waitHealthy(ctx, o.Wait); err != nil {
		if o.Dedicated && ctx.Err() == nil {
			return nil, &EngineError{err.Error()}
		}
		return nil, err
	}
	begin := time.Now()
	o.tell(Progress{Phase: Recording})
	counted, traced := counts.New(countedModel(o.Report)), newReservoir(o.TraceTokens, o.Seed)
	refused, err := sendAll(ctx, c, o, func(result *recorded) (tokens int) {
		counted.Add(result.tokens, result.experts)
		traced.add(result)
		return int(counted.Tokens())
	})
	if err != nil {
		return nil, err
	}
	t := assemble(o, traced.requests(), domains)
	if err := t.Validate(); err != nil {
		return nil, &EngineError{fmt.Sprintf("the engine's answers make no sense: %v", err)}
	}
	return &Profile{t, Summary{
		Requests: t.Requests(), Refused: refused, Tokens: int(counted.Tokens()), TracedTokens: len(t.Tokens),
		DistinctTokens: counted.Distinct(), CoverageMilli: 1000 * counted.Distinct() / o.Report.Vocab,
		SkewMilli: int(1000 * counted.Skew()), Seconds: time.Since(begin).Seconds(),
	}, counted}, nil
}

// outcome is the end of one request.
type outcome struct {
	item   int
	result *recorded
	err    error
}

// sendAll sends the items, passes the answers on until the tokens suffice, and returns how many were refused. Answers are
// passed on in the order in which the items were sent, whatever the order in which they came: what is recorded does not
// depend on the engine's speed. At most 2 x Concurrency answers wait for an earlier one.
func sendAll(ctx context.Context, c *client, o Options, consume func(*recorded) (tokens int)) (refused int, err error) {
	ctx, stop := context.WithCancel(ctx)
	var group errgroup.Group
	group.SetLimit(o.Concurrency)
	queue := make(chan chan outcome, o.Concurrency)
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		defer close(queue)
		for _, item := range rand.New(rand.NewPCG(o.Seed, 0x73656e64)).Perm(len(o.Items)) {
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
		_ = group.Wait() // its functions return no error
	}()

	begin, done, tokens := time.Now(), 0, 0
	for future := range queue {
		end := <-future
		var refusal *RefusedError
		switch {
		case errors.As(end.err, &refusal) && refusal.Message == noExperts && tokens > 0 && !o.Dedicated:
			// The answers so far may be of what served before, and another attempt finds one of the two alone.
			return 0, fmt.Errorf("line %d of the data set: %w, and answers before it had them: another model or engine has begun to serve", o.Items[end.item].Line, end.err)
		case errors.As(end.err, &refusal):
			refused++
			if tokens == 0 && (refused >= refusals || refused == len(o.Items)) {
				return 0, &EngineError{fmt.Sprintf("line %d of the data set, like all before it: %v", o.Items[end.item].Line, end.err)}
			}
		case end.err != nil:
			return 0, fmt.Errorf("line %d of the data set: %w", o.Items[end.item].Line, end.err)
		default:
			end.result.item = end.item
			tokens = consume(end.result)
		}
		done++
		o.tell(Progress{Phase: Recording, Done: done, Tokens: tokens, Elapsed: time.Since(begin)})
		if tokens >= o.Tokens {
			break
		}
	}
	if tokens == 0 { // only an ended context leaves requests unsent, or all unanswered
		return 0, errors.Join(errors.New("no request was answered"), ctx.Err())
	}
	return refused, ctx.Err()
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
		var broken *EngineError
		if err == nil || errors.As(err, &refusal) || errors.As(err, &broken) || ctx.Err() != nil {
			return result, err
		}
		if o.Dedicated && errors.Is(err, syscall.ECONNREFUSED) {
			return nil, &EngineError{fmt.Sprintf("the engine at %s has served, and takes no connection any more: it has died", c.base)}
		}
		last = err
	}
	if o.Dedicated {
		return nil, &EngineError{fmt.Sprintf("failed %d times: %v", attempts, last)}
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
	for _, token := range tokens {
		if token < 0 || int(token) >= o.Report.Vocab {
			return nil, &EngineError{fmt.Sprintf("the engine reports token id %d; the model's vocabulary has ids 0 to %d", token, o.Report.Vocab-1)}
		}
	}
	kept, err := moeOnly(experts, o.Report)
	return &recorded{tokens: tokens, experts: kept}, err
}

// moeOnly drops the rows of dense layers, whose content is meaningless, and checks the others.
func moeOnly(experts []int32, report checkpoint.Report) ([]uint16, error) {
	row := report.Layers * report.ExpertsPerToken
	kept := make([]uint16, 0, len(experts)/row*len(report.MoELayers)*report.ExpertsPerToken)
	for token := 0; token < len(experts); token += row {
		for _, layer := range report.MoELayers {
			start, begin := token+layer*report.ExpertsPerToken, len(kept)
			for _, expert := range experts[start : start+report.ExpertsPerToken] {
				if expert < 0 || int(expert) >= report.Experts {
					return nil, &EngineError{fmt.Sprintf("the engine reports expert %d in layer %d; the model has experts 0 to %d", expert, layer, report.Experts-1)}
				}
				if slices.Contains(kept[begin:], uint16(expert)) {
					return nil, &EngineError{fmt.Sprintf("the engine reports expert %d twice for token %d in layer %d; a token's experts must differ: the engine has not recorded them", expert, token/row, layer)}
				}
				kept = append(kept, uint16(expert))
			}
		}
	}
	return kept, nil
}

// domainsOf lists the domains of the items in their order by name; none where no item has one.
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
