// SPDX-License-Identifier: Apache-2.0

package inspection

import (
	"encoding/json"
	"time"

	batchv1 "k8s.io/api/batch/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/kube/writes"
)

// Writes returns the writes that record a result, delete obsolete Jobs and start the next attempt, in order, and the
// delay of the next decision. If newJob is nil, no attempt is started.
func (s State) Writes(newJob func(attempt int) *batchv1.Job, now time.Time) (ordered []writes.Write, again time.Duration, err error) {
	if s.Unrecorded != nil {
		report, err := json.Marshal(Report{*s.Report, s.Dataset})
		if err != nil {
			return nil, 0, err
		}
		ordered = append(ordered, writes.Annotate{Object: s.Unrecorded, Annotations: map[string]string{semmoev1.AnnotationReport: string(report)}})
	}
	for _, job := range s.Obsolete {
		ordered = append(ordered, writes.Delete{Object: job})
	}
	switch wait := s.NextAt.Sub(now); {
	case s.NextAttempt == 0 || newJob == nil:
		return ordered, 0, nil
	case wait > 0:
		return ordered, wait, nil
	}
	return append(ordered, writes.Create{Object: newJob(s.NextAttempt)}), 0, nil
}
