package enginecounts

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/stepsizes"
)

const (
	// halfLife is the time in which the weight of a counted step halves.
	halfLife = time.Hour
	// maxRanks bounds the ranks of a pod, and maxBuckets the buckets of a rank's histogram.
	maxRanks, maxBuckets = 1024, 256
	// maxCount bounds a counter: every integer up to it is a float64.
	maxCount = 1 << 53
)

// rankSteps is what an engine has counted of the steps of one rank since it started.
type rankSteps struct {
	// buckets are those of a histogram, by ascending bound, with the steps that have at most so many tokens; sum is their tokens.
	buckets []bucket
	sum     float64
	// running is the number of requests that are being computed, and servers the number of those that count steps, each the part of its own requests.
	running, servers float64
	// kinds are counters of decode and prefill.
	kinds [2]stepCount
}

type bucket struct{ bound, steps float64 }

type stepCount struct{ steps, tokens float64 }

const (
	decode = iota
	prefill
)

// stepReader collects the counters of steps from the lines of an exposition.
type stepReader struct {
	metrics *engine.StepMetrics
	ranks   map[string]*rankSteps
	// oneServer reports that the engine's steps are counted whole.
	oneServer bool
}

// line reads a line, which may be of another metric.
func (r *stepReader) line(text []byte) error {
	m := r.metrics
	r.oneServer = r.oneServer || m.OneServer == "" || bytes.HasPrefix(text, []byte(m.OneServer+" "))
	name, rest, ok := bytes.Cut(text, []byte("{"))
	if !ok {
		return nil
	}
	metric := string(name)
	series, isOfHistogram := strings.CutPrefix(metric, m.Histogram)
	isOfHistogram = isOfHistogram && m.Histogram != "" && (series == "_bucket" || series == "_sum")
	if !isOfHistogram && (metric != m.Running || m.Running == "") && (metric != m.Steps && metric != m.Tokens || m.Steps == "") {
		return nil
	}
	labels, value, err := sample(rest)
	if err != nil {
		return fmt.Errorf("%s: %w", metric, err)
	}
	special, err := take(&labels, map[bool]string{true: "le", false: m.Kind}[isOfHistogram])
	if err != nil {
		return fmt.Errorf("%s: %w", metric, err)
	}
	of := r.ranks[labels]
	if of == nil {
		if len(r.ranks) == maxRanks {
			return fmt.Errorf("%s has more than %d ranks", metric, maxRanks)
		}
		of = &rankSteps{}
		r.ranks[labels] = of
	}
	switch {
	case series == "_sum" && isOfHistogram:
		of.sum = value
	case isOfHistogram:
		bound, err := strconv.ParseFloat(special, 64)
		if err != nil || math.IsNaN(bound) || len(of.buckets) == maxBuckets {
			return fmt.Errorf("%s has the bound %.40q, or more than %d bounds", metric, special, maxBuckets)
		}
		of.buckets = append(of.buckets, bucket{bound, value})
	case metric == m.Running:
		of.running = value
	default:
		for kind, names := range [2]engine.StepKind{decode: m.Decode, prefill: m.Prefill} {
			if metric == m.Steps && strings.HasPrefix(special, names.Steps) {
				of.kinds[kind].steps += value
			}
			if metric == m.Tokens && special == names.Tokens {
				of.kinds[kind].tokens += value
			}
		}
	}
	return nil
}

// sample splits what follows a metric's name and "{" into the labels and the value.
func sample(text []byte) (labels string, value float64, err error) {
	end := bytes.LastIndexByte(text, '}')
	if end < 0 {
		return "", 0, errors.New("the labels have no end")
	}
	fields := bytes.Fields(text[end+1:])
	if len(fields) == 0 {
		return "", 0, errors.New("a series has no value")
	}
	switch value, err = strconv.ParseFloat(string(fields[0]), 64); { // messages do not contain what changes from one reading to the next
	case err != nil || math.IsNaN(value):
		return "", 0, errors.New("a value is no number")
	case value < 0:
		return "", 0, errors.New("a value is negative")
	case value > maxCount:
		return "", 0, errors.New("a value is infinite, or too large for a count")
	}
	return string(text[:end]), value, nil
}

// take removes a label from labels and returns its value; empty for a series without the label. The other labels are spelled alike after it.
func take(labels *string, name string) (value string, err error) {
	var kept []string
	for rest := strings.TrimLeft(*labels, ", "); rest != ""; rest = strings.TrimLeft(rest, ", ") {
		key, quoted, ok := strings.Cut(rest, "=")
		text, err := strconv.QuotedPrefix(quoted)
		if !ok || err != nil {
			return "", fmt.Errorf("the labels %.100q cannot be read", *labels)
		}
		if rest = quoted[len(text):]; key != name {
			kept = append(kept, key+"="+text)
		} else if value, err = strconv.Unquote(text); err != nil {
			return "", fmt.Errorf("the label %s is %.40q", key, text)
		}
	}
	*labels = strings.Join(kept, ",")
	return value, nil
}

// read returns what was collected.
func (r *stepReader) read() (map[string]*rankSteps, error) {
	m := r.metrics
	counted := false
	for rank, of := range r.ranks {
		slices.SortStableFunc(of.buckets, func(a, b bucket) int { return int(math.Copysign(1, a.bound-b.bound)) })
		for i, b := range of.buckets {
			if i > 0 && (b.steps < of.buckets[i-1].steps || b.bound == of.buckets[i-1].bound) {
				return nil, fmt.Errorf("%s{%.100q counts fewer steps up to a larger bound, or has a bound twice", m.Histogram, rank)
			}
		}
		if n := len(of.buckets); n > 0 && !math.IsInf(of.buckets[n-1].bound, 1) {
			return nil, fmt.Errorf("%s{%.100q has no bucket +Inf", m.Histogram, rank)
		}
		counted = counted || len(of.buckets) > 0 || m.Steps != ""
		if of.servers = 1; !r.oneServer {
			of.servers = float64(len(r.ranks))
		}
	}
	switch {
	case counted:
		return r.ranks, nil
	case m.Steps != "":
		return nil, fmt.Errorf("no %s: the engine has computed nothing yet, or has no such metric", m.Steps) // it begins with the first step
	}
	return nil, fmt.Errorf("no %s", m.Histogram)
}

// since returns the steps that a rank has counted since an earlier reading, unless it was restarted.
func (of *rankSteps) since(before *rankSteps) (counted []stepsOf, _ error) {
	for kind, c := range of.kinds {
		steps, tokens := c.steps-before.kinds[kind].steps, c.tokens-before.kinds[kind].tokens
		if steps < 0 || tokens < 0 {
			return nil, errRestarted
		}
		if steps > 0 && tokens > 0 {
			counted = append(counted, stepsOf{tokens: tokens / steps, steps: steps, prefill: kind == prefill})
		}
	}
	tokens := of.sum - before.sum
	if tokens < 0 || len(of.buckets) != len(before.buckets) {
		return nil, errRestarted
	}
	inBuckets, err := sizesIn(of.buckets, before.buckets, tokens)
	running := max(of.running, before.running, 1)
	for i := range inBuckets {
		c := &inBuckets[i]
		if c.prefill = c.lower >= running; !c.prefill && of.servers > 1 {
			// The parts of a step of decode are alike, and together have at most a token of each request.
			whole := max(c.tokens, min(of.servers*c.tokens, running))
			c.tokens, c.steps = whole, c.steps*c.tokens/whole
		}
	}
	return append(counted, inBuckets...), err
}

// sizesIn estimates the tokens of the steps that a histogram has counted since an earlier reading, given their sum. A step is first taken for the
// geometric mean of the bounds of its bucket, and then all are multiplied so that the sum is right, as far as the bounds allow.
func sizesIn(buckets, before []bucket, tokens float64) (counted []stepsOf, _ error) {
	var last, lastBefore bucket
	estimated := 0.0
	for i, b := range buckets {
		steps := (b.steps - last.steps) - (before[i].steps - lastBefore.steps)
		if steps < 0 || b.bound != before[i].bound {
			return nil, errRestarted
		}
		if steps > 0 {
			size := math.Sqrt(max(last.bound, 1) * max(b.bound, 1))
			if math.IsInf(b.bound, 1) {
				size = max(last.bound, (tokens-estimated)/steps) // what the others leave
			}
			counted = append(counted, stepsOf{tokens: size, steps: steps, lower: last.bound, upper: b.bound})
			estimated += size * steps
		}
		last, lastBefore = b, before[i]
	}
	for i := range counted {
		c := &counted[i]
		c.tokens = min(max(c.tokens*tokens/estimated, c.lower), c.upper)
	}
	return counted, nil
}

// errRestarted is of an engine whose counters began anew.
var errRestarted = errors.New("the engine was restarted")

// stepsOf are steps of one rank that computed about as many tokens, and bounds of these.
type stepsOf struct {
	tokens, steps float64
	lower, upper  float64
	prefill       bool
}

// podSteps follows the steps of a pod.
type podSteps struct {
	last      map[string]*rankSteps
	at        time.Time
	histogram stepsizes.Histogram
	problem   string
}

// add adds what was counted since the last reading. Ranks compute steps together: a step has the tokens of all ranks. Which steps of the ranks
// are one is not known. Those of a rank that has counted fewer than another were empty; all others are taken for steps of that many ranks.
func (p *podSteps) add(ranks map[string]*rankSteps, now time.Time) {
	last, before := p.last, p.at
	p.last, p.at, p.problem = ranks, now, ""
	if last == nil || now.Before(before) {
		return
	}
	p.histogram.Fade(math.Exp2(-now.Sub(before).Hours() / halfLife.Hours()))
	var all []stepsOf
	sum, most := 0.0, 0.0
	for name, of := range ranks {
		began := last[name]
		if began == nil {
			began = &rankSteps{buckets: slices.Clone(of.buckets)}
			for i := range began.buckets {
				began.buckets[i].steps = 0
			}
		}
		counted, err := of.since(began)
		if err != nil {
			return
		}
		steps := 0.0
		for _, c := range counted {
			steps += c.steps
		}
		all, sum, most = append(all, counted...), sum+steps, max(most, steps)
	}
	for _, c := range all {
		steps := c.steps * most / sum
		inPrefill := 0.0
		if c.prefill {
			inPrefill = steps
		}
		p.histogram.Add(c.tokens*sum/most, steps, inPrefill)
	}
}
