// SPDX-License-Identifier: Apache-2.0

package report

import (
	"encoding/base64"
	"fmt"
	"html/template"

	"github.com/semmoe/operator/solver/schedule"
)

// drawnLayers is the number of layers in the drawing. Two layers show how consecutive layers overlap.
const drawnLayers = 2

// scheduleView is the view of a plan's schedule inside a layer.
type scheduleView struct {
	*schedule.Schedule
	// Drawn is the sequence length that Drawing shows, and Alternative its text alternative. Drawing is empty if there
	// is none.
	Drawn       int
	Drawing     template.URL
	Alternative string
}

// scheduleViewOf draws the schedule of the median sequence length. The drawing is a separate image, so that its style
// does not affect the page.
func scheduleViewOf(s *schedule.Schedule) *scheduleView {
	v := &scheduleView{Schedule: s}
	if len(s.Disaggregated) == 0 {
		return v
	}
	length := &s.Disaggregated[len(s.Disaggregated)/2]
	drawing, err := length.Draw(length.Sequence, drawnLayers)
	if err != nil {
		return v // too many tasks for a drawing
	}
	v.Drawn, v.Drawing = length.Sequence, template.URL("data:image/svg+xml;base64,"+base64.StdEncoding.EncodeToString(drawing))
	v.Alternative = fmt.Sprintf("Timeline of the first %s: attention group, expert group and the links between them. Each attention rank has %d micro-batches × %d samples, in %d chunks, order %s.",
		plural(drawnLayers, "MoE layer"), length.Sizes.MicroBatches, length.Samples, length.Sizes.Chunks, length.OrderName)
	return v
}
