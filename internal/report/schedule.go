package report

import (
	"encoding/base64"
	"fmt"
	"html/template"

	"github.com/semmoe/operator/solver/schedule"
)

// drawnLayers are those of the drawing: two show how one follows the other.
const drawnLayers = 2

// workView is a plan's schedule inside a layer, as the page shows it.
type workView struct {
	*schedule.Schedule
	// Drawn is the length that Drawing shows, and Alternative says what is to be seen; Drawing is empty where there is none.
	Drawn       int
	Drawing     template.URL
	Alternative string
}

// workOf draws the schedule of the middle one of the lengths. An image of its own keeps its style to itself.
func workOf(s *schedule.Schedule) *workView {
	v := &workView{Schedule: s}
	if len(s.Disaggregated) == 0 {
		return v
	}
	length := &s.Disaggregated[len(s.Disaggregated)/2]
	drawing, err := length.Draw(length.Sequence, drawnLayers)
	if err != nil {
		return v // it has too many tasks to be drawn
	}
	v.Drawn, v.Drawing = length.Sequence, template.URL("data:image/svg+xml;base64,"+base64.StdEncoding.EncodeToString(drawing))
	v.Alternative = fmt.Sprintf("Timeline of the first %s: attention group, expert group and the links between them. On an attention rank micro-batches %d × samples %d, in chunks %d, order %s.",
		plural(drawnLayers, "MoE layer"), length.Sizes.MicroBatches, length.Samples, length.Sizes.Chunks, length.OrderName)
	return v
}
