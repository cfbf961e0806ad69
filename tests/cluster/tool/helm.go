package main

import (
	"os"

	helmcmd "helm.sh/helm/v4/pkg/cmd"
	"helm.sh/helm/v4/pkg/kube"
)

func helm() {
	kube.ManagedFieldsManager = "helm" // else it is the name of this binary
	command, err := helmcmd.NewRootCmd(os.Stdout, os.Args[1:], helmcmd.SetupLogging)
	if err != nil {
		fail("helm", err)
	}
	if command.Execute() != nil { // it has printed its error
		os.Exit(1)
	}
}
