// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"text/tabwriter"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// timeline reads the events of the act's MoEDeployment, as in kubectl describe, oldest first.
func (d *demo) timeline(ctx context.Context) ([]corev1.Event, error) {
	text, err := d.cluster.run(ctx, nil, "get", "events", "-n", namespace,
		"--field-selector", "involvedObject.kind=MoEDeployment,involvedObject.name="+d.name, "-o", "json")
	if err != nil {
		return nil, err
	}
	var list corev1.EventList
	if err := json.Unmarshal([]byte(text), &list); err != nil {
		return nil, err
	}
	slices.SortStableFunc(list.Items, func(a, b corev1.Event) int {
		return cmp.Or(begun(a).Compare(begun(b)), cmp.Compare(a.ResourceVersion, b.ResourceVersion))
	})
	return list.Items, nil
}

// begun returns the time when an event first occurred.
func begun(event corev1.Event) time.Time {
	if !event.EventTime.IsZero() {
		return event.EventTime.Time
	}
	return event.FirstTimestamp.Time
}

func printTimeline(w io.Writer, events []corev1.Event) {
	if len(events) == 0 {
		return
	}
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "\nSeconds\tType\tReason\tEvent")
	for _, event := range events {
		fmt.Fprintf(table, "%.0f\t%s\t%s\t%s\n", begun(event).Sub(begun(events[0])).Seconds(), event.Type, event.Reason, firstRunes(event.Message, 150))
	}
	table.Flush() //nolint:errcheck // a terminal
}
