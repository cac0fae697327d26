// SPDX-License-Identifier: Apache-2.0

package moedeployment

import (
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/internal/kube/ownership"
	"github.com/semmoe/operator/internal/profile/inspection"
)

func inspectionInputs(moed *semmoev1.MoEDeployment) inspection.Inputs {
	return inspection.InputsOf(moed.Spec.Model, moed.Spec.Template)
}

func inspectionJob(moed *semmoev1.MoEDeployment, image string, pull corev1.PullPolicy, attempt int) *batchv1.Job {
	inputs := inspectionInputs(moed)
	return inspection.Job(moed.Namespace, moed.Name+"-inspect", ownership.ControllerReference(moed, "MoEDeployment"),
		desired.Labels(moed, semmoev1.ComponentInspect, semmoev1.LabelInputs, inputs.Hash()), inputs, image, pull, attempt)
}
