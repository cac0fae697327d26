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

// page is what the template shows.
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
	// Rates, Together, Loads and Saved are the charts; nil where there is nothing to draw.
	Rates, Together, Loads, Saved *chart
	// FrontChart shows the placements that the plan was chosen from, CopiesChart the numbers of copies; nil where the plan records none.
	FrontChart, CopiesChart  *chart
	LoadHeats                []heatView
	LoadLow, LoadTop         string
	Pictures                 []pictureView
	KindTable                bool
	Kinds                    []kindView
	MovedShare, Moved        string
	MovedBytes, BusiestBytes string
	Method                   string
	Work                     *workView
}

// figure is a key figure.
type figure struct{ Name, Value, Note string }

type heatView struct {
	Title, Alternative string
	Image              template.URL
	Width, Height      int
	// Lines are drawn over it; many of them are Fine, so that they leave something to see.
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
	// Cells are the shares of its tokens on each rank in whole percent, Most the ranks that have most.
	Cells []int
	Most  string
}

// manyRanks is the number of lines in a picture from which on they are fine.
const manyRanks = 16

// tableRanks is the most ranks that have columns of their own in a table.
const tableRanks = 12

// Render writes the page.
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
		v.Work = workOf(d.Schedule)
	}
	v.change()
	v.Figures = d.figures(v)
	v.FrontChart, v.CopiesChart = d.frontChart(), d.copiesChart()
	if d.Score == nil {
		return v, nil
	}
	var err error
	if v.Scale, err = scale(); err != nil {
		return nil, err
	}
	v.Rates, v.Together, v.Loads = d.Score.rateChart(), d.Score.togetherChart(), d.Score.loadChart()
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
		view, err := of.heat.view(of.title, fmt.Sprintf("Heat map of the activations that each rank computes, a row for each of %s, a column for each of %s. The busiest rank of a layer has %s of the mean, on average over layers.",
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
	v.KindTable = d.Ranks <= tableRanks
	for i := range d.Score.Kinds {
		v.Kinds = append(v.Kinds, d.Score.Kinds[i].view())
	}
	return v, nil
}

// missing says what the inputs leave out, and what to pass.
func (d *Data) missing() []string {
	if d.Score == nil && d.Promise != nil {
		return []string{"These figures are from the status of the PlacementPlan. Figures by layer, rank, kind of request and batch size need the routing trace, which the artifact store gives only to the operator: run semmoe report --plan DIR --trace FILE with a trace of yours."}
	}
	if d.Score == nil {
		return []string{"Without a routing trace nothing can be said about local activation rates, heat maps, loads, kinds of requests and time: pass --trace with the trace that the plan was solved from, or a newer one of the same model."}
	}
	var out []string
	if d.Score.Times == nil {
		out = append(out, "The trace does not tell the model's hidden size and the size of an expert, so bytes and times are left out: record it from a checkpoint whose config.json has hidden_size and moe_intermediate_size (or intermediate_size).")
	}
	if d.Score.Times != nil && d.Score.Times.PromptTokens == 0 {
		out = append(out, "The trace does not tell the sizes of attention, so the time to the first token is left out: record it from a checkpoint whose config.json has num_attention_heads.")
	}
	if len(d.Score.Kinds) == 0 {
		out = append(out, "The trace names no kinds of text, so which kinds go to which rank is left out: give the profile's data set a domain for each document.")
	}
	if !d.Score.Documents {
		out = append(out, fmt.Sprintf("Fewer than %d documents judge, so the spread over documents is left out: pass a trace of more.", solver.JackknifeParts))
	}
	return out
}

// change words what would change.
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

// figures are those that a reader looks for first.
func (d *Data) figures(v *page) []figure {
	moved := figure{"Experts that move", v.Moved, v.MovedShare + " of all slots"}
	if v.MovedBytes != "" {
		moved.Note += ", " + v.MovedBytes
	}
	if d.Change.OtherRanks {
		moved = figure{"Experts that move", "all", "today's default placement has other ranks"}
	}
	if d.Score == nil {
		out := []figure{moved, {"Slots on a rank", count(d.SlotsPerRank), "in each MoE layer"}}
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
		out = append(out, figure{"With a perfect forecast", percent(s.Oracle), "and no placement exceeds " + percent(s.Bound)})
	}
	if t := s.Times; t != nil {
		out = append(out, figure{"Modelled time of a layer", points(-t.Served.SavedPercent()),
			fmt.Sprintf("%s instead of %s, at %s tokens a batch", microseconds(t.Served.Before.Total()-t.Served.Saved), microseconds(t.Served.Before.Total()), count(t.Served.BatchTokens))})
		pays := figure{"Gains " + strconv.Itoa(solver.DefaultMinimumGainPercent) + "% from", count(t.PaysFrom), "tokens a batch on, over all ranks"}
		if t.PaysFrom == 0 {
			pays.Value, pays.Note = "no size", "up to "+count(batchSizes[len(batchSizes)-1])+" tokens a batch"
		}
		out = append(out, pays)
	}
	return append(out,
		figure{"Busiest rank's experts", percent(s.ImbalanceAfter), "of the mean load; today " + percent(s.ImbalanceBefore)}, moved)
}

// span is the smallest and the largest of some values, at n places each.
func span(n int, values ...func(i int) float64) (least, most float64) {
	least, most = math.Inf(1), math.Inf(-1)
	for _, value := range values {
		for i := range n {
			least, most = min(least, value(i)), max(most, value(i))
		}
	}
	return least, most
}

func (s *Score) layerName(l int) string { return strconv.Itoa(s.Layers[l].Layer) }

// rateChart is the local activation rate by layer.
func (s *Score) rateChart() *chart {
	bound, oracle := func(l int) float64 { return s.Layers[l].Bound }, func(l int) float64 { return s.Layers[l].Oracle }
	after, before := func(l int) float64 { return s.Layers[l].After }, func(l int) float64 { return s.Layers[l].Before }
	_, most := span(len(s.Layers), bound, oracle, after, before)
	order := s.byGain()
	best, worst := &s.Layers[order[0]], &s.Layers[order[len(order)-1]]
	c := newChart(fmt.Sprintf("Line chart of the local activation rate by layer. The plan is highest above today in layer %d, %s against %s, and least in layer %d, %s against %s.",
		best.Layer, percent(best.After), percent(best.Before), worst.Layer, percent(worst.After), percent(worst.Before)), len(s.Layers), 0, max(most, 0.01), wholePercent)
	c.line("bound", "upper bound", bound)
	c.line("oracle", "perfect forecast", oracle)
	c.line("plan", "this plan", after)
	c.line("today", "today", before)
	c.label(s.layerName)
	return c
}

// wholePercent labels an axis: steps are round, what is behind four digits is not meant.
func wholePercent(v float64) string { return strconv.FormatFloat(100*v, 'g', 4, 64) + "%" }

// togetherChart is how often experts of one rank fire together, by layer.
func (s *Score) togetherChart() *chart {
	after, before := func(l int) float64 { return s.Layers[l].TogetherAfter }, func(l int) float64 { return s.Layers[l].TogetherBefore }
	_, most := span(len(s.Layers), after, before)
	sumBefore, sumAfter := 0.0, 0.0
	for l := range s.Layers {
		sumBefore += before(l) / float64(len(s.Layers))
		sumAfter += after(l) / float64(len(s.Layers))
	}
	c := newChart(fmt.Sprintf("Line chart, by layer, of how many times as often as chance two experts of one rank fire together: on average %s with the plan, %s today.", times(sumAfter), times(sumBefore)),
		len(s.Layers), 0, max(most, 1.2), func(v float64) string { return strconv.FormatFloat(v, 'g', 3, 64) + "×" })
	c.level("bound", "chance", 1)
	c.line("plan", "this plan", after)
	c.line("today", "today", before)
	c.label(s.layerName)
	return c
}

// loadChart is what ranks compute, mean over layers.
func (s *Score) loadChart() *chart {
	after, before := func(r int) float64 { return s.Ranks[r].ServedAfter }, func(r int) float64 { return s.Ranks[r].ServedBefore }
	_, most := span(len(s.Ranks), after, before)
	low, high := span(len(s.Ranks), after)
	lowToday, highToday := span(len(s.Ranks), before)
	c := newChart(fmt.Sprintf("Bar chart of the activations that each rank's experts compute, in equal shares: %s to %s with the plan, %s to %s today.",
		percent(low), percent(high), percent(lowToday), percent(highToday)), len(s.Ranks), 0, max(most, 1.1), wholePercent)
	c.bars("bar-today", "today", 0, 2, before)
	c.bars("bar-plan", "this plan", 1, 2, after)
	c.level("bound", "equal share", 1)
	c.label(strconv.Itoa)
	return c
}

// choiceChart shows the modelled time of each alternative that was chosen from, relative to the slowest one.
func choiceChart(alternative, others string, places, chosen int, time func(place int) float64, label func(place int) string) *chart {
	if places == 0 {
		return nil
	}
	_, slowest := span(places, time)
	at := func(isChosen bool) func(int) float64 {
		return func(i int) float64 {
			if (i == chosen) != isChosen || slowest == 0 {
				return 0
			}
			return time(i) / slowest
		}
	}
	c := newChart(alternative, places, 0, 1, wholePercent)
	c.bars("bar-today", others, 0, 1, at(false))
	c.bars("bar-plan", "this plan", 0, 1, at(true))
	c.label(label)
	return c
}

// frontChart is about the placements that the plan was chosen from.
func (d *Data) frontChart() *chart {
	return choiceChart("Bar chart of the modelled time of an MoE layer under each placement that the plan was chosen from; the table has the figures.", "other placements",
		len(d.Front), slices.IndexFunc(d.Front, func(p solver.FrontPoint) bool { return p.Name == d.Chosen }),
		func(i int) float64 { return d.Front[i].Microseconds() }, func(i int) string { return d.Front[i].Name })
}

// copiesChart is about the numbers of copies that the plan's was chosen from; nil where it was given.
func (d *Data) copiesChart() *chart {
	if d.Copies == nil {
		return nil
	}
	points := d.Copies.Points
	return choiceChart("Bar chart of the modelled time of an MoE layer with each number of copies of experts per rank; the table has the figures.", "other numbers",
		len(points), slices.IndexFunc(points, func(p solver.CopyPoint) bool { return p.RedundantSlots == d.Copies.Chosen }),
		func(i int) float64 { return points[i].LayerUS }, func(i int) string { return strconv.Itoa(points[i].RedundantSlots) })
}

// FrontSizes are the batch sizes of the front, ascending.
func (d *Data) FrontSizes() []string {
	var sizes []string
	if len(d.Front) > 0 {
		sizes = slices.Collect(maps.Keys(d.Front[0].LayerUS))
	}
	slices.SortFunc(sizes, func(a, b string) int { return cmp.Or(cmp.Compare(len(a), len(b)), cmp.Compare(a, b)) })
	return sizes
}

// chart is the part of a layer's time that is saved, by batch size.
func (t *Times) chart() *chart {
	low, high := func(i int) float64 { return t.Sizes[i].Low() }, func(i int) float64 { return t.Sizes[i].High() }
	mean := func(i int) float64 { return t.Sizes[i].SavedPercent() }
	least, most := span(len(t.Sizes), low, high)
	first, last := &t.Sizes[0], &t.Sizes[len(t.Sizes)-1]
	c := newChart(fmt.Sprintf("Line chart of the part of a MoE layer's modelled time that the plan saves, by tokens a batch: %s at %s, %s at %s.",
		points(first.SavedPercent()), count(first.BatchTokens), points(last.SavedPercent()), count(last.BatchTokens)),
		len(t.Sizes), min(least, 0), max(most, 2*solver.DefaultMinimumGainPercent), func(v float64) string { return strings.TrimSuffix(strings.TrimSuffix(points(v), "%"), ".0") + "%" })
	c.band("band", "95% interval", low, high)
	c.level("bound", fmt.Sprintf("%d%%: worth a roll-out", solver.DefaultMinimumGainPercent), solver.DefaultMinimumGainPercent)
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

// method says where times and their intervals come from.
func (t *Times) method(d *Data) string {
	exchange := "as measured"
	if t.Machines.Nominal {
		exchange = "at the nominal rate of a 400 Gb/s adapter for each rank, as the ranks have several nodes and the profile is of one"
	}
	spread := "the spread over documents"
	if !d.Score.Documents {
		spread = "no spread over documents, of which there are too few,"
	}
	link := &t.Machines.Link
	method := fmt.Sprintf("Times are modelled by the hardware profile %s: %s of the busiest rank for each of two exchanges, %s, and the experts' products on the slowest rank. Intervals contain %s and the errors of the fits, %.0f%% for exchanges and %.0f%% for products.",
		t.Machines.Profile, lines(link), exchange, spread, 100*link.Fit.Error(), 100*t.Machines.Grouped.Fit.Error())
	if t.PromptTokens == 0 {
		return method
	}
	return method + fmt.Sprintf(" The time to the first token is that of a prompt of %s, the mean of those that judge, on ranks that are filled by others like it and with no queue: attention, shared experts and layers without experts are added by the same profile; embeddings, norms and sampling are not.",
		plural(t.PromptTokens, "token"))
}

// lines are the start-up times and rates of an exchange.
func lines(e *hardware.Exchange) string {
	var words []string
	for _, l := range e.Lines() {
		words = append(words, microseconds(l.Start)+" and "+strconv.FormatFloat(l.PerMicrosecond/1e3, 'f', 0, 64)+" GB/s")
	}
	return strings.Join(words, ", or for large ones ")
}

// view readies a picture for the page; lines are drawn over it.
func (h *Heat) view(title, alternative, lines string) (heatView, error) {
	image, err := h.image()
	return heatView{Title: title, Alternative: alternative, Image: image, Width: h.Columns, Height: h.Rows, Lines: lines, Fine: len(h.ColumnBounds) >= manyRanks}, err
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
		{&v.Pairs, &p.PairsBefore, "Today", fmt.Sprintf("Heat map of pairs of experts in layer %d, in the order of today's ranks. Experts of one rank fire together %s as often as chance.", p.Layer.Layer, times(p.TogetherBefore)), p.PairsBefore.blocks()},
		{&v.Pairs, &p.PairsAfter, "With this plan", fmt.Sprintf("Heat map of pairs of experts in layer %d, in the order of the plan's ranks. Experts of one rank fire together %s as often as chance.", p.Layer.Layer, times(p.TogetherAfter)), p.PairsAfter.blocks()},
		{&v.Tokens, &p.TokensBefore, "Today", fmt.Sprintf("Heat map of %s (rows, the most frequent first) and the experts that they activate (columns, by today's ranks) in layer %d.", plural(p.TokensBefore.Rows, "token id"), p.Layer.Layer), p.TokensBefore.lines()},
		{&v.Tokens, &p.TokensAfter, "With this plan", fmt.Sprintf("Heat map of the same token ids (rows, by the rank that the plan's tables send them to) and experts (columns, by the plan's ranks) in layer %d. The local activation rate is %s, today %s.", p.Layer.Layer, percent(p.After), percent(p.Before)), p.TokensAfter.lines()},
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
	var most []string
	for _, rank := range order[:min(3, len(order))] {
		most = append(most, fmt.Sprintf("rank %d (%d%%)", rank, v.Cells[rank]))
	}
	v.Most = strings.Join(most, ", ")
	return v
}

func meanBusiest(loads [][]float64) float64 {
	sum := 0.0
	for _, row := range loads {
		sum += slices.Max(row) / float64(len(loads))
	}
	return sum
}
