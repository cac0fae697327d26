// SPDX-License-Identifier: Apache-2.0

package report

import (
	"cmp"
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/cost/hardware"
)

var (
	//go:embed page.html
	pageText string
	//go:embed style.css
	styleText string
	pages     = template.Must(template.New("page").Funcs(template.FuncMap{
		"percent": percent, "points": points, "times": times, "count": count, "us": microseconds, "bytes": func(n int64) string { return bytes10(float64(n)) }, "short": short, "plural": plural,
		"rate": func(v float64) string { return count(int(math.Round(v))) },
	}).Parse(pageText))
)

// page is the data of the template.
type page struct {
	*Data
	Style             template.CSS
	Scale             template.URL
	Title             string
	Headline, Verdict string
	TodayIs, Holder   string
	Minimum           int
	Figures           []figure
	Missing           []string
	// Rates, Coactivation, Loads and Saved are the charts. A chart without data is nil.
	Rates, Coactivation, Loads, Saved *chart
	// CopiesChart shows the candidate numbers of copies. It is nil if the plan records none.
	CopiesChart              *chart
	LoadHeats                []heatView
	LoadLow, LoadTop         string
	Pictures                 []pictureView
	KindTable                bool
	Kinds                    []kindView
	MovedShare, Moved        string
	MovedBytes, BusiestBytes string
	Method                   string
	Work                     *scheduleView
}

// figure is a key figure.
type figure struct{ Name, Value, Note string }

type heatView struct {
	Title, Alternative string
	Image              template.URL
	Width, Height      int
	// Lines is the path of the rank boundaries over the image. Fine selects thin lines, for many ranks.
	Lines string
	Fine  bool
}

type pictureView struct {
	*Picture
	Pairs, Tokens       []heatView
	PairsTop, TokensTop string
}

type kindView struct {
	*Kind
	// Cells are the shares of the kind's tokens on each rank, in whole percent. TopRanks names the ranks with the
	// largest shares.
	Cells    []int
	TopRanks string
}

// fineLines is the minimum number of rank boundaries in a heat map that are drawn as thin lines.
const fineLines = 16

// maxRankColumns is the maximum number of ranks that have table columns.
const maxRankColumns = 12

// Render writes the HTML page.
func Render(w io.Writer, d *Data) error {
	v, err := d.view()
	if err != nil {
		return err
	}
	return pages.Execute(w, v)
}

func (d *Data) view() (*page, error) {
	v := &page{
		Data: d, Style: template.CSS(styleText), Title: "Plan " + short(d.Digest), Headline: d.headline(), Verdict: d.verdict(), TodayIs: d.today(),
		Holder: d.holder(), Minimum: solver.DefaultMinimumGainPercent, Missing: d.missing(),
	}
	if d.Name != "" {
		v.Title = d.Name + ": plan " + short(d.Digest)
	}
	if d.Schedule != nil {
		v.Work = scheduleViewOf(d.Schedule)
	}
	v.change()
	v.Figures = d.figures(v)
	v.CopiesChart = d.copiesChart()
	if d.Score == nil {
		return v, nil
	}
	var err error
	if v.Scale, err = scale(); err != nil {
		return nil, err
	}
	v.Rates, v.Coactivation, v.Loads = d.Score.rateChart(), d.Score.coactivationChart(), d.Score.loadChart()
	if d.Score.Times != nil {
		v.Saved = d.Score.Times.chart()
		v.Method = d.Score.Times.method(d)
	}
	before, after := d.Score.loadHeats()
	v.LoadLow, v.LoadTop = percent(after.Low), percent(after.Top)
	for _, of := range []struct {
		title string
		heat  *Heat
		loads [][]float64
	}{{"Today", &before, d.Score.LoadBefore}, {"With this plan", &after, d.Score.LoadAfter}} {
		view, err := of.heat.view(of.title, fmt.Sprintf("Heat map of the activations that each rank computes. Rows: %s. Columns: %s. The busiest rank of a layer has %s of the mean, on average over layers.",
			plural(len(of.loads), "MoE layer"), plural(len(of.loads[0]), "rank"), percent(meanBusiest(of.loads))), of.heat.lines())
		if err != nil {
			return nil, err
		}
		v.LoadHeats = append(v.LoadHeats, view)
	}
	for i := range d.Score.Pictures {
		p, err := d.Score.Pictures[i].view()
		if err != nil {
			return nil, err
		}
		v.Pictures = append(v.Pictures, p)
	}
	v.KindTable = d.Ranks <= maxRankColumns
	for i := range d.Score.Kinds {
		v.Kinds = append(v.Kinds, d.Score.Kinds[i].view())
	}
	return v, nil
}

// missing returns notes on missing figures, with the input that each of them needs.
func (d *Data) missing() []string {
	if d.Score == nil && d.Promise != nil {
		return []string{"These figures are from the status of the PlacementPlan. Figures by layer, rank, kind of request and batch size need the routing trace, which only the operator can read from the artifact store. If you have a trace file, run semmoe report --plan DIR --trace FILE."}
	}
	if d.Score == nil {
		return []string{"Local activation rates, heat maps, loads, kinds of requests and times need a routing trace: pass --trace with the trace that the plan was solved from, or a newer trace of the same model."}
	}
	var out []string
	if d.Score.Times == nil {
		out = append(out, "Bytes and times are omitted, because the trace lacks the hidden size and the expert size of the model: record the trace from a checkpoint whose config.json has hidden_size and moe_intermediate_size (or intermediate_size).")
	}
	if d.Score.Times != nil && d.Score.Times.PromptTokens == 0 {
		out = append(out, "The time to first token is omitted, because the trace lacks the attention sizes of the model: record the trace from a checkpoint whose config.json has num_attention_heads.")
	}
	if len(d.Score.Kinds) == 0 {
		out = append(out, "The distribution of kinds of text over ranks is omitted, because the trace names no kinds of text: set a domain for each document of the profile's data set.")
	}
	if !d.Score.Documents {
		out = append(out, fmt.Sprintf("The spread over documents is omitted, because the plan is evaluated on fewer than %d documents: pass a trace with more documents.", solver.JackknifeParts))
	}
	return out
}

// change formats the figures of the changed placement.
func (v *page) change() {
	c := &v.Change
	v.Moved = count(c.Total) + " of " + count(c.Slots)
	v.MovedShare = percent(float64(c.Total) / float64(c.Slots))
	if c.ExpertWeights > 0 && c.Total > 0 {
		const weightBytes = 2
		v.MovedBytes = bytes10(float64(c.Total) * float64(c.ExpertWeights) * weightBytes)
		v.BusiestBytes = bytes10(float64(c.BusiestRank) * float64(c.ExpertWeights) * weightBytes)
	}
}

// figures returns the key figures.
func (d *Data) figures(v *page) []figure {
	moved := figure{"Experts that move", v.Moved, v.MovedShare + " of all slots"}
	if v.MovedBytes != "" {
		moved.Note += ", " + v.MovedBytes
	}
	if d.Change.OtherRanks {
		moved = figure{"Experts that move", "all", "today's default placement has a different number of ranks"}
	}
	if d.Score == nil {
		out := []figure{moved, {"Slots per rank", count(d.SlotsPerRank), "in each MoE layer"}}
		if d.Promise != nil {
			out = append(d.Promise.figures(), out...)
		}
		return out
	}
	s := d.Score
	rate := figure{"Local activations", percent(s.After), "today " + percent(s.Before)}
	if s.Documents {
		rate.Note += fmt.Sprintf("; gain %+.1f ± %.1f points", 100*(s.After-s.Before), 2*100*s.GainError)
	}
	out := []figure{rate}
	if s.Oracle > 0 {
		out = append(out, figure{"With a perfect forecast", percent(s.Oracle), "the upper bound of all placements is " + percent(s.Bound)})
	}
	if t := s.Times; t != nil {
		out = append(out, figure{"Modelled time of a layer", points(-t.Served.SavedPercent()),
			fmt.Sprintf("%s instead of %s, at %s tokens per batch", microseconds(t.Served.Before.Total()-t.Served.Saved), microseconds(t.Served.Before.Total()), count(t.Served.BatchTokens))})
		pays := figure{"Minimum batch for " + strconv.Itoa(solver.DefaultMinimumGainPercent) + "% gain", count(t.PaysFrom), "tokens per batch, over all ranks"}
		if t.PaysFrom == 0 {
			pays.Value, pays.Note = "none", "up to "+count(batchSizes[len(batchSizes)-1])+" tokens per batch"
		}
		out = append(out, pays)
	}
	return append(out,
		figure{"Busiest rank's experts", percent(s.ImbalanceAfter), "of the mean load; today " + percent(s.ImbalanceBefore)}, moved)
}

// span returns the minimum and the maximum of several series of n values.
func span(n int, values ...func(i int) float64) (low, high float64) {
	low, high = math.Inf(1), math.Inf(-1)
	for _, value := range values {
		for i := range n {
			low, high = min(low, value(i)), max(high, value(i))
		}
	}
	return low, high
}

func (s *Score) layerName(l int) string { return strconv.Itoa(s.Layers[l].Layer) }

// rateChart draws the local activation rate by layer.
func (s *Score) rateChart() *chart {
	bound, oracle := func(l int) float64 { return s.Layers[l].Bound }, func(l int) float64 { return s.Layers[l].Oracle }
	after, before := func(l int) float64 { return s.Layers[l].After }, func(l int) float64 { return s.Layers[l].Before }
	_, high := span(len(s.Layers), bound, oracle, after, before)
	order := s.byGain()
	best, worst := &s.Layers[order[0]], &s.Layers[order[len(order)-1]]
	c := newChart(fmt.Sprintf("Line chart of the local activation rate by layer. The largest gain is in layer %d, %s versus %s today, and the smallest in layer %d, %s versus %s today.",
		best.Layer, percent(best.After), percent(best.Before), worst.Layer, percent(worst.After), percent(worst.Before)), len(s.Layers), 0, max(high, 0.01), wholePercent)
	c.line("bound", "upper bound", bound)
	c.line("oracle", "perfect forecast", oracle)
	c.line("plan", "this plan", after)
	c.line("today", "today", before)
	c.label(s.layerName)
	return c
}

// wholePercent formats an axis label. Axis steps are round numbers, so four digits are enough and hide rounding errors.
func wholePercent(v float64) string { return strconv.FormatFloat(100*v, 'g', 4, 64) + "%" }

// coactivationChart draws the co-activation of the experts of one rank, relative to chance, by layer.
func (s *Score) coactivationChart() *chart {
	after, before := func(l int) float64 { return s.Layers[l].CoactivationAfter }, func(l int) float64 { return s.Layers[l].CoactivationBefore }
	_, high := span(len(s.Layers), after, before)
	sumBefore, sumAfter := 0.0, 0.0
	for l := range s.Layers {
		sumBefore += before(l) / float64(len(s.Layers))
		sumAfter += after(l) / float64(len(s.Layers))
	}
	c := newChart(fmt.Sprintf("Line chart of the co-activation of two experts of one rank relative to chance, by layer: on average %s with the plan, %s today.", times(sumAfter), times(sumBefore)),
		len(s.Layers), 0, max(high, 1.2), func(v float64) string { return strconv.FormatFloat(v, 'g', 3, 64) + "×" })
	c.level("bound", "chance", 1)
	c.line("plan", "this plan", after)
	c.line("today", "today", before)
	c.label(s.layerName)
	return c
}

// loadChart draws the activations that each rank computes, as means over layers.
func (s *Score) loadChart() *chart {
	after, before := func(r int) float64 { return s.Ranks[r].ServedAfter }, func(r int) float64 { return s.Ranks[r].ServedBefore }
	_, top := span(len(s.Ranks), after, before)
	low, high := span(len(s.Ranks), after)
	lowToday, highToday := span(len(s.Ranks), before)
	c := newChart(fmt.Sprintf("Bar chart of the activations that each rank's experts compute, relative to an equal share: %s to %s with the plan, %s to %s today.",
		percent(low), percent(high), percent(lowToday), percent(highToday)), len(s.Ranks), 0, max(top, 1.1), wholePercent)
	c.bars("bar-today", "today", 0, 2, before)
	c.bars("bar-plan", "this plan", 1, 2, after)
	c.level("bound", "equal share", 1)
	c.label(strconv.Itoa)
	return c
}

// candidateBar is a candidate placement with the modelled time of a layer.
type candidateBar struct {
	Name         string
	Chosen       bool
	Microseconds float64
	// Percent is the time in percent of the slowest candidate.
	Percent float64
}

// FrontBars returns the candidate placements in the order of their times.
func (d *Data) FrontBars() []candidateBar {
	var bars []candidateBar
	slowest := 0.0
	for i := range d.Front {
		point := &d.Front[i]
		slowest = max(slowest, point.Microseconds())
		bars = append(bars, candidateBar{Name: point.Name, Chosen: point.Name == d.Chosen, Microseconds: point.Microseconds()})
	}
	for i := range bars {
		if slowest > 0 {
			bars[i].Percent = round(100 * bars[i].Microseconds / slowest)
		}
	}
	slices.SortStableFunc(bars, func(a, b candidateBar) int { return cmp.Compare(a.Microseconds, b.Microseconds) })
	return bars
}

// copiesChart draws the modelled time of each candidate number of copies relative to the slowest one. It returns nil if
// the number was given.
func (d *Data) copiesChart() *chart {
	if d.Copies == nil || len(d.Copies.Points) == 0 {
		return nil
	}
	points := d.Copies.Points
	_, slowest := span(len(points), func(i int) float64 { return points[i].LayerUS })
	bars := func(chosen bool) func(int) float64 {
		return func(i int) float64 {
			if (points[i].RedundantSlots == d.Copies.Chosen) != chosen || slowest == 0 {
				return 0
			}
			return points[i].LayerUS / slowest
		}
	}
	c := newChart("Bar chart of the modelled time of an MoE layer with each number of copies of experts per rank; the table has the figures.",
		len(points), 0, 1, wholePercent)
	c.bars("bar-today", "other numbers", 0, 1, bars(false))
	c.bars("bar-plan", "this plan", 0, 1, bars(true))
	c.label(func(i int) string { return strconv.Itoa(points[i].RedundantSlots) })
	return c
}

// FrontSizes returns the batch sizes of the candidate placements, ascending.
func (d *Data) FrontSizes() []string {
	var sizes []string
	if len(d.Front) > 0 {
		sizes = slices.Collect(maps.Keys(d.Front[0].LayerUS))
	}
	slices.SortFunc(sizes, func(a, b string) int { return cmp.Or(cmp.Compare(len(a), len(b)), cmp.Compare(a, b)) })
	return sizes
}

// chart draws the saved part of a layer's modelled time, by batch size.
func (t *Times) chart() *chart {
	low, high := func(i int) float64 { return t.Sizes[i].Low() }, func(i int) float64 { return t.Sizes[i].High() }
	mean := func(i int) float64 { return t.Sizes[i].SavedPercent() }
	bottom, top := span(len(t.Sizes), low, high)
	first, last := &t.Sizes[0], &t.Sizes[len(t.Sizes)-1]
	c := newChart(fmt.Sprintf("Line chart of the part of an MoE layer's modelled time that the plan saves, by tokens per batch: %s at %s, %s at %s.",
		points(first.SavedPercent()), count(first.BatchTokens), points(last.SavedPercent()), count(last.BatchTokens)),
		len(t.Sizes), min(bottom, 0), max(top, 2*solver.DefaultMinimumGainPercent), func(v float64) string { return strings.TrimSuffix(strings.TrimSuffix(points(v), "%"), ".0") + "%" })
	c.band("band", "95% interval", low, high)
	c.level("bound", fmt.Sprintf("%d%%: minimum gain for a rollout", solver.DefaultMinimumGainPercent), solver.DefaultMinimumGainPercent)
	c.line("plan", "saved by this plan", mean)
	for i, size := range t.Sizes {
		name := strconv.Itoa(size.BatchTokens)
		if size.BatchTokens >= 1024 {
			name = strconv.Itoa(size.BatchTokens/1024) + "k"
		}
		c.X = append(c.X, tick{round(c.x(i) * 100 / chartWidth), name})
	}
	return c
}

// method describes how times and their intervals are computed.
func (t *Times) method(d *Data) string {
	exchange := "as measured"
	if t.Machines.Nominal {
		exchange = "at the nominal rate of one 400 Gb/s adapter per rank, because the ranks span several nodes and the profile is of one node"
	}
	spread := "the spread over documents and the errors"
	if !d.Score.Documents {
		spread = "only the errors (there are too few documents for a spread)"
	}
	link := &t.Machines.Link
	method := fmt.Sprintf("Times are modelled with the hardware profile %s: the busiest rank's two exchanges (%s, %s), and the experts' matrix products on the slowest rank. Intervals contain %s of the fits, %.0f%% for exchanges and %.0f%% for products.",
		t.Machines.Profile, lines(link), exchange, spread, 100*link.Fit.Error(), 100*t.Machines.Grouped.Fit.Error())
	if t.PromptTokens == 0 {
		return method
	}
	return method + fmt.Sprintf(" The time to first token is that of a prompt of %s, the mean length of the evaluated requests, without queueing and with all ranks filled by equal prompts. It includes attention, shared experts and layers without experts, modelled with the same profile, but no embeddings, norms and sampling.",
		plural(t.PromptTokens, "token"))
}

// lines formats the start-up times and rates of an exchange.
func lines(e *hardware.Exchange) string {
	var words []string
	for _, l := range e.Lines() {
		words = append(words, microseconds(l.Start)+" and "+strconv.FormatFloat(l.PerMicrosecond/1e3, 'f', 0, 64)+" GB/s")
	}
	return strings.Join(words, ", or for large exchanges ")
}

// view converts a heat map for the page. lines is the path of the rank boundaries.
func (h *Heat) view(title, alternative, lines string) (heatView, error) {
	image, err := h.image()
	return heatView{Title: title, Alternative: alternative, Image: image, Width: h.Columns, Height: h.Rows, Lines: lines, Fine: len(h.ColumnBounds) >= fineLines}, err
}

func (p *Picture) view() (pictureView, error) {
	v := pictureView{Picture: p, PairsTop: times(p.PairsAfter.Top), TokensTop: times(p.TokensAfter.Top)}
	for _, of := range []struct {
		to          *[]heatView
		heat        *Heat
		title       string
		alternative string
		lines       string
	}{
		{&v.Pairs, &p.PairsBefore, "Today", fmt.Sprintf("Heat map of pairs of experts in layer %d, in the order of today's ranks. Experts of one rank are activated together %s as often as by chance.", p.Layer.Layer, times(p.CoactivationBefore)), p.PairsBefore.blocks()},
		{&v.Pairs, &p.PairsAfter, "With this plan", fmt.Sprintf("Heat map of pairs of experts in layer %d, in the order of the plan's ranks. Experts of one rank are activated together %s as often as by chance.", p.Layer.Layer, times(p.CoactivationAfter)), p.PairsAfter.blocks()},
		{&v.Tokens, &p.TokensBefore, "Today", fmt.Sprintf("Heat map of %s (rows, the most frequent first) and the experts that they activate (columns, by today's ranks) in layer %d.", plural(p.TokensBefore.Rows, "token ID"), p.Layer.Layer), p.TokensBefore.lines()},
		{&v.Tokens, &p.TokensAfter, "With this plan", fmt.Sprintf("Heat map of the same token IDs (rows, by the rank that the plan's tables select) and experts (columns, by the plan's ranks) in layer %d. The local activation rate is %s, today %s.", p.Layer.Layer, percent(p.After), percent(p.Before)), p.TokensAfter.lines()},
	} {
		view, err := of.heat.view(of.title, of.alternative, of.lines)
		if err != nil {
			return v, err
		}
		*of.to = append(*of.to, view)
	}
	return v, nil
}

func (k *Kind) view() kindView {
	v := kindView{Kind: k}
	order := make([]int, len(k.Ranks))
	for rank, share := range k.Ranks {
		order[rank] = rank
		v.Cells = append(v.Cells, int(100*share+0.5))
	}
	slices.SortStableFunc(order, func(a, b int) int { return v.Cells[b] - v.Cells[a] })
	var top []string
	for _, rank := range order[:min(3, len(order))] {
		top = append(top, fmt.Sprintf("rank %d (%d%%)", rank, v.Cells[rank]))
	}
	v.TopRanks = strings.Join(top, ", ")
	return v
}

func meanBusiest(loads [][]float64) float64 {
	sum := 0.0
	for _, row := range loads {
		sum += slices.Max(row) / float64(len(loads))
	}
	return sum
}
