"""Kernels share this: choice by device, compiled C, launch order, compilation ahead."""
